"""The words of the generated corpus: English and German, with all their forms and the endings that agree with them."""

from __future__ import annotations

from typing import NamedTuple


class Noun(NamedTuple):
    """`gender` is m, f or n; `kind` is "person", "animal" or "thing"; `weak` nouns take -n outside the nominative."""

    en: str
    en_plural: str
    de: str
    de_plural: str
    gender: str
    kind: str
    weak: bool = False


class Verb(NamedTuple):
    """German forms: infinitive (= plural), first and third person singular, past singular and plural, all without the
    particle. `case` is the object's, `None` for intransitive verbs."""

    en: str
    en_third: str
    en_past: str
    de: str
    de_first: str
    de_third: str
    de_past: str
    de_past_plural: str
    particle: str = ""
    case: str | None = "acc"
    en_particle: str = ""


NOUNS = [
    Noun("teacher", "teachers", "Lehrer", "Lehrer", "m", "person"),
    Noun("doctor", "doctors", "Arzt", "Ärzte", "m", "person"),
    Noun("neighbour", "neighbours", "Nachbar", "Nachbarn", "m", "person", True),
    Noun("student", "students", "Student", "Studenten", "m", "person", True),
    Noun("farmer", "farmers", "Bauer", "Bauern", "m", "person", True),
    Noun("boy", "boys", "Junge", "Jungen", "m", "person", True),
    Noun("baker", "bakers", "Bäcker", "Bäcker", "m", "person"),
    Noun("son", "sons", "Sohn", "Söhne", "m", "person"),
    Noun("woman", "women", "Frau", "Frauen", "f", "person"),
    Noun("daughter", "daughters", "Tochter", "Töchter", "f", "person"),
    Noun("sister", "sisters", "Schwester", "Schwestern", "f", "person"),
    Noun("queen", "queens", "Königin", "Königinnen", "f", "person"),
    Noun("judge", "judges", "Richterin", "Richterinnen", "f", "person"),
    Noun("girl", "girls", "Mädchen", "Mädchen", "n", "person"),
    Noun("child", "children", "Kind", "Kinder", "n", "person"),
    Noun("dog", "dogs", "Hund", "Hunde", "m", "animal"),
    Noun("bird", "birds", "Vogel", "Vögel", "m", "animal"),
    Noun("cat", "cats", "Katze", "Katzen", "f", "animal"),
    Noun("mouse", "mice", "Maus", "Mäuse", "f", "animal"),
    Noun("horse", "horses", "Pferd", "Pferde", "n", "animal"),
    Noun("sheep", "sheep", "Schaf", "Schafe", "n", "animal"),
    Noun("letter", "letters", "Brief", "Briefe", "m", "thing"),
    Noun("table", "tables", "Tisch", "Tische", "m", "thing"),
    Noun("apple", "apples", "Apfel", "Äpfel", "m", "thing"),
    Noun("lamp", "lamps", "Lampe", "Lampen", "f", "thing"),
    Noun("bag", "bags", "Tasche", "Taschen", "f", "thing"),
    Noun("door", "doors", "Tür", "Türen", "f", "thing"),
    Noun("book", "books", "Buch", "Bücher", "n", "thing"),
    Noun("picture", "pictures", "Bild", "Bilder", "n", "thing"),
    Noun("window", "windows", "Fenster", "Fenster", "n", "thing"),
]
PLACES = [
    Noun("garden", "gardens", "Garten", "Gärten", "m", "place"),
    Noun("forest", "forests", "Wald", "Wälder", "m", "place"),
    Noun("kitchen", "kitchens", "Küche", "Küchen", "f", "place"),
    Noun("school", "schools", "Schule", "Schulen", "f", "place"),
    Noun("city", "cities", "Stadt", "Städte", "f", "place"),
    Noun("house", "houses", "Haus", "Häuser", "n", "place"),
    Noun("village", "villages", "Dorf", "Dörfer", "n", "place"),
    Noun("office", "offices", "Büro", "Büros", "n", "place"),
]
ADJECTIVES = [
    ("old", "alt"),
    ("young", "jung"),
    ("small", "klein"),
    ("big", "groß"),
    ("new", "neu"),
    ("beautiful", "schön"),
    ("strange", "seltsam"),
    ("clever", "klug"),
    ("lazy", "faul"),
    ("quiet", "still"),
    ("poor", "arm"),
    ("strong", "stark"),
    ("red", "rot"),
    ("green", "grün"),
]
# Things can be seen, but cannot see.
TRANSITIVE = [
    Verb("see", "sees", "saw", "sehen", "sehe", "sieht", "sah", "sahen"),
    Verb("love", "loves", "loved", "lieben", "liebe", "liebt", "liebte", "liebten"),
    Verb("find", "finds", "found", "finden", "finde", "findet", "fand", "fanden"),
    Verb("need", "needs", "needed", "brauchen", "brauche", "braucht", "brauchte", "brauchten"),
    Verb("forget", "forgets", "forgot", "vergessen", "vergesse", "vergisst", "vergaß", "vergaßen"),
    Verb("carry", "carries", "carried", "tragen", "trage", "trägt", "trug", "trugen"),
    Verb("paint", "paints", "painted", "malen", "male", "malt", "malte", "malten"),
    Verb("hear", "hears", "heard", "hören", "höre", "hört", "hörte", "hörten"),
    Verb("follow", "follows", "followed", "folgen", "folge", "folgt", "folgte", "folgten", case="dat"),
    Verb("help", "helps", "helped", "helfen", "helfe", "hilft", "half", "halfen", case="dat"),
    Verb("thank", "thanks", "thanked", "danken", "danke", "dankt", "dankte", "dankten", case="dat"),
    Verb("collect", "collects", "collected", "holen", "hole", "holt", "holte", "holten", "ab"),
    Verb("call", "calls", "called", "rufen", "rufe", "ruft", "rief", "riefen", "an"),
    Verb("invite", "invites", "invited", "laden", "lade", "lädt", "lud", "luden", "ein"),
    Verb(
        "bring", "brings", "brought", "bringen", "bringe", "bringt", "brachte", "brachten", "mit", en_particle="along"
    ),
    Verb("look", "looks", "looked", "sehen", "sehe", "sieht", "sah", "sahen", "an", en_particle="at"),
    Verb("listen", "listens", "listened", "hören", "höre", "hört", "hörte", "hörten", "zu", "dat", "to"),
    Verb("watch", "watches", "watched", "schauen", "schaue", "schaut", "schaute", "schauten", "zu", "dat"),
]
INTRANSITIVE = [
    Verb("sleep", "sleeps", "slept", "schlafen", "schlafe", "schläft", "schlief", "schliefen", case=None),
    Verb("laugh", "laughs", "laughed", "lachen", "lache", "lacht", "lachte", "lachten", case=None),
    Verb("sing", "sings", "sang", "singen", "singe", "singt", "sang", "sangen", case=None),
    Verb("work", "works", "worked", "arbeiten", "arbeite", "arbeitet", "arbeitete", "arbeiteten", case=None),
    Verb("wait", "waits", "waited", "warten", "warte", "wartet", "wartete", "warteten", case=None),
    Verb("dance", "dances", "danced", "tanzen", "tanze", "tanzt", "tanzte", "tanzten", case=None),
    Verb("arrive", "arrives", "arrived", "kommen", "komme", "kommt", "kam", "kamen", "an", None),
    Verb("get", "gets", "got", "stehen", "stehe", "steht", "stand", "standen", "auf", None, "up"),
    Verb("fall", "falls", "fell", "schlafen", "schlafe", "schläft", "schlief", "schliefen", "ein", None, "asleep"),
    Verb("go", "goes", "went", "gehen", "gehe", "geht", "ging", "gingen", "weg", None, "away"),
]
SENTENTIAL = [
    Verb("say", "says", "said", "sagen", "sage", "sagt", "sagte", "sagten", case=None),
    Verb("know", "knows", "knew", "wissen", "weiß", "weiß", "wusste", "wussten", case=None),
    Verb("believe", "believes", "believed", "glauben", "glaube", "glaubt", "glaubte", "glaubten", case=None),
    Verb("hope", "hopes", "hoped", "hoffen", "hoffe", "hofft", "hoffte", "hofften", case=None),
    Verb("hear", "hears", "heard", "hören", "höre", "hört", "hörte", "hörten", case=None),
]
MODALS = [
    Verb("can", "can", "could", "können", "kann", "kann", "konnte", "konnten"),
    Verb("have to", "has to", "had to", "müssen", "muss", "muss", "musste", "mussten"),
    Verb("want to", "wants to", "wanted to", "wollen", "will", "will", "wollte", "wollten"),
]
ADVERBS = [
    ("today", "heute"),
    ("here", "hier"),
    ("often", "oft"),
    ("sometimes", "manchmal"),
    ("in the evening", "am Abend"),
    ("on Sunday", "am Sonntag"),
]
CONJUNCTIONS = [("because", "weil"), ("when", "wenn"), ("although", "obwohl"), ("while", "während")]
PREPOSITIONS = [("with", "mit", "dat"), ("without", "ohne", "acc"), ("for", "für", "acc"), ("behind", "hinter", "dat")]
# English, German, whether a past or present form follows is the clause's choice; persons: 1 or 3.
PRONOUNS = [
    ("I", "ich", "sg", 1),
    ("we", "wir", "pl", 1),
    ("he", "er", "sg", 3),
    ("she", "sie", "sg", 3),
    ("they", "sie", "pl", 3),
]

DEFINITE = {
    "nom": {"m": "er", "f": "ie", "n": "as", "pl": "ie"},
    "acc": {"m": "en", "f": "ie", "n": "as", "pl": "ie"},
    "dat": {"m": "em", "f": "er", "n": "em", "pl": "en"},
}
DIESER = {
    **DEFINITE,
    "nom": {"m": "er", "f": "e", "n": "es", "pl": "e"},
    "acc": {"m": "en", "f": "e", "n": "es", "pl": "e"},
}
EIN = {
    "nom": {"m": "", "f": "e", "n": "", "pl": "e"},
    "acc": {"m": "en", "f": "e", "n": "", "pl": "e"},
    "dat": {"m": "em", "f": "er", "n": "em", "pl": "en"},
}
# (English singular, English plural or None, German stem, its endings, adjective declension)
DETERMINERS = [
    ("the", "the", "d", DEFINITE, "weak"),
    ("the", "the", "d", DEFINITE, "weak"),
    ("this", "these", "dies", DIESER, "weak"),
    ("every", None, "jed", DIESER, "weak"),
    ("a", None, "ein", EIN, "mixed"),
    ("my", "my", "mein", EIN, "mixed"),
    ("our", "our", "unser", EIN, "mixed"),
]
BARE_PLURAL = ("", "", "", None, "strong")
