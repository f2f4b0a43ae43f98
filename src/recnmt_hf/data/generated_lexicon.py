"""Words of the generated corpus, English and German, with the forms and endings in which they agree."""

from __future__ import annotations

from typing import NamedTuple


class Noun(NamedTuple):
    """`gender` is m, f or n; `kind` is person, animal, thing or place; `weak` nouns take -n outside the nominative."""

    en: str
    en_plural: str
    de: str
    de_plural: str
    gender: str
    kind: str
    weak: bool

    def german(self, plural: bool, case: str) -> str:
        """Return the German form of a number and case."""
        if plural:
            return self.de_plural + ("n" if case == "dat" and self.de_plural[-1] not in "ns" else "")
        if self.weak and case != "nom":
            return self.de + ("n" if self.de[-1] in "er" else "en")
        return self.de


class Verb(NamedTuple):
    """German forms without the particle. `case` is that of the object; empty for intransitive verbs."""

    en: str
    en_third: str
    en_past: str
    de: str
    de_third: str
    de_past: str
    case: str
    particle: str
    en_particle: str

    def english(self, past: bool, third: bool) -> str:
        """Return the English finite form."""
        return self.en_past if past else self.en_third if third else self.en

    def german(self, past: bool, number: str, person: int) -> str:
        """Return the German finite form without the particle."""
        if past:
            return self.de_past + ("" if number == "sg" else "n" if self.de_past[-1] == "e" else "en")
        if number == "pl":
            return self.de
        # Modal verbs and "wissen" have one form for both persons, which does not end in -t.
        return self.de[:-1] if person == 1 and self.de_third[-1] == "t" else self.de_third

    @property
    def needs_living_object(self) -> bool:
        """`True` if the object must be a person or an animal, as for help, call and invite."""
        return self.case == "dat" or self.particle == "ein" or self.de == "rufen"


class Determiner(NamedTuple):
    """`plural` is `None` for words without a plural; `declension` is that of a following German adjective."""

    singular: str
    plural: str | None
    stem: str
    endings: dict[str, dict[str, str]]
    declension: str


def read_nouns(**kinds: str) -> list[Noun]:
    """Read `english/plural german/plural gender[!]` with commas between nouns, by kind; `!` marks weak ones."""
    nouns = []
    for kind, text in kinds.items():
        for english, german, gender in (entry.split() for entry in text.split(",")):
            en, _, en_plural = english.partition("/")
            de, _, de_plural = german.partition("/")
            nouns.append(Noun(en, en_plural or f"{en}s", de, de_plural or de, gender[0], kind, gender[1:] == "!"))
    return nouns


def read_verbs(case: str, text: str) -> list[Verb]:
    """
    Read `english third past: german third past` with commas between verbs. Marks: `+particle` (German), `-particle`
    (English), `=case` if it is not `case`. `_` is a space.
    """
    verbs = []
    for entry in text.split(","):
        english, german = (part.split() for part in entry.split(":"))
        marks = {mark[0]: mark[1:] for mark in german[3:]}
        forms = (word.replace("_", " ") for word in (*english, *german[:3]))
        verbs.append(Verb._make([*forms, marks.get("=", case), marks.get("+", ""), marks.get("-", "")]))
    return verbs


def read_pairs(text: str) -> list[tuple[str, str]]:
    """Read `english: german` with commas between pairs."""
    return [(en.strip(), de.strip()) for en, de in (pair.split(":") for pair in text.split(","))]


def read_endings(**cases: str) -> dict[str, dict[str, str]]:
    """Read the endings for m, f, n and plural of each case; `-` is an empty one."""
    forms = ("m", "f", "n", "pl")
    return {case: dict(zip(forms, text.replace("-", "").split(" "), strict=True)) for case, text in cases.items()}


NOUNS = read_nouns(
    person="""teacher Lehrer m, doctor Arzt/Ärzte m, neighbour Nachbar/Nachbarn m!, student Student/Studenten m!,
    farmer Bauer/Bauern m!, boy Junge/Jungen m!, baker Bäcker m, son Sohn/Söhne m, woman/women Frau/Frauen f,
    daughter Tochter/Töchter f, sister Schwester/Schwestern f, queen Königin/Königinnen f,
    judge Richterin/Richterinnen f, girl Mädchen n, child/children Kind/Kinder n""",
    animal="""dog Hund/Hunde m, bird Vogel/Vögel m, cat Katze/Katzen f, mouse/mice Maus/Mäuse f, horse Pferd/Pferde n,
    sheep/sheep Schaf/Schafe n""",
    thing="""letter Brief/Briefe m, table Tisch/Tische m, apple Apfel/Äpfel m, lamp Lampe/Lampen f,
    bag Tasche/Taschen f, door Tür/Türen f, book Buch/Bücher n, picture Bild/Bilder n, window Fenster n""",
)
PLACES = read_nouns(
    place="""garden Garten/Gärten m, forest Wald/Wälder m, kitchen Küche/Küchen f, school Schule/Schulen f,
    city/cities Stadt/Städte f, house Haus/Häuser n, village Dorf/Dörfer n, office Büro/Büros n"""
)
TRANSITIVE = read_verbs(
    "acc",
    """see sees saw: sehen sieht sah, love loves loved: lieben liebt liebte, find finds found: finden findet fand,
    need needs needed: brauchen braucht brauchte, forget forgets forgot: vergessen vergisst vergaß,
    carry carries carried: tragen trägt trug, paint paints painted: malen malt malte,
    hear hears heard: hören hört hörte, follow follows followed: folgen folgt folgte =dat,
    help helps helped: helfen hilft half =dat, thank thanks thanked: danken dankt dankte =dat,
    collect collects collected: holen holt holte +ab, call calls called: rufen ruft rief +an,
    invite invites invited: laden lädt lud +ein, bring brings brought: bringen bringt brachte +mit -along,
    look looks looked: sehen sieht sah +an -at, listen listens listened: hören hört hörte +zu -to =dat,
    watch watches watched: schauen schaut schaute +zu =dat""",
)
INTRANSITIVE = read_verbs(
    "",
    """sleep sleeps slept: schlafen schläft schlief, laugh laughs laughed: lachen lacht lachte,
    sing sings sang: singen singt sang, work works worked: arbeiten arbeitet arbeitete,
    wait waits waited: warten wartet wartete, dance dances danced: tanzen tanzt tanzte,
    arrive arrives arrived: kommen kommt kam +an, get gets got: stehen steht stand +auf -up,
    fall falls fell: schlafen schläft schlief +ein -asleep, go goes went: gehen geht ging +weg -away""",
)
SENTENTIAL = read_verbs(
    "",
    """say says said: sagen sagt sagte, know knows knew: wissen weiß wusste, believe believes believed: glauben glaubt
    glaubte, hope hopes hoped: hoffen hofft hoffte, hear hears heard: hören hört hörte""",
)
MODALS = read_verbs(
    "",
    """can can could: können kann konnte, have_to has_to had_to: müssen muss musste,
    want_to wants_to wanted_to: wollen will wollte""",
)
# (number and person, or tense and number) -> English and German
COPULA = {
    "sg 1": ("am", "bin"),
    "sg 3": ("is", "ist"),
    "pl": ("are", "sind"),
    "past sg": ("was", "war"),
    "past pl": ("were", "waren"),
}
ADJECTIVES = read_pairs(
    """old: alt, young: jung, small: klein, big: groß, new: neu, beautiful: schön, strange: seltsam, clever: klug,
    lazy: faul, quiet: still, poor: arm, strong: stark, red: rot, green: grün"""
)
ADVERBS = read_pairs(
    "today: heute, here: hier, often: oft, sometimes: manchmal, in the evening: am Abend, on Sunday: am Sonntag"
)
CONJUNCTIONS = read_pairs("because: weil, when: wenn, although: obwohl, while: während")
PREPOSITIONS = [("with", "mit", "dat"), ("without", "ohne", "acc"), ("for", "für", "acc"), ("behind", "hinter", "dat")]
# English, German, number, person
PRONOUNS = [("I", "ich", "sg", 1), ("we", "wir", "pl", 1), ("he", "er", "sg", 3), ("she", "sie", "sg", 3)]
PRONOUNS += [("they", "sie", "pl", 3)]
DEFINITE = read_endings(nom="er ie as ie", acc="en ie as ie", dat="em er em en")
DIESER = read_endings(nom="er e es e", acc="en e es e", dat="em er em en")
EIN = read_endings(nom="- e - e", acc="en e - e", dat="em er em en")
DETERMINERS = [
    Determiner("the", "the", "d", DEFINITE, "weak"),
    Determiner("the", "the", "d", DEFINITE, "weak"),  # twice as frequent
    Determiner("this", "these", "dies", DIESER, "weak"),
    Determiner("every", None, "jed", DIESER, "weak"),
    Determiner("a", None, "ein", EIN, "mixed"),
    Determiner("my", "my", "mein", EIN, "mixed"),
    Determiner("our", "our", "unser", EIN, "mixed"),
]
BARE_PLURAL = Determiner("", "", "", read_endings(nom="- - - -", acc="- - - -", dat="- - - -"), "strong")
