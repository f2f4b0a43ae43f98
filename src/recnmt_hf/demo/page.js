(() => {
  // Words with attention: the word under the pointer or with the focus, and the words that it is linked to.
  const words = (pair, side) => [...pair.querySelectorAll(`.rn-${side} .rn-word`)];
  const pairsOf = (word) => (word.dataset.links || "").split(" ").filter(Boolean).map((link) => link.split(":").map(Number));
  const level = (share) => (share >= 50 ? 3 : share >= 25 ? 2 : 1);
  function clear(pair) {
    for (const word of pair.querySelectorAll(".rn-word")) word.className = "rn-word";
    pair.querySelector(".rn-links").textContent = "\u00a0";
  }
  function show(word) {
    const pair = word.closest(".rn-pair");
    clear(pair);
    const source = words(pair, "source"), target = words(pair, "target");
    const at = source.indexOf(word);
    const linked = at < 0
      ? pairsOf(word).map(([i, share]) => [source[i], share])
      : target.flatMap((other) => pairsOf(other).filter(([i]) => i === at).map(([, share]) => [other, share]));
    word.classList.add("rn-on");
    for (const [other, share] of linked) other.classList.add(`rn-${level(share)}`);
    const list = linked.map(([other, share]) => `${other.textContent} ${share}%`).join(", ");
    pair.querySelector(".rn-links").textContent = `${word.textContent} ${at < 0 ? "\u2190" : "\u2192"} ${list || "no word"}`;
  }
  const wordOf = (event) => (event.target instanceof Element ? event.target.closest(".rn-word") : null);
  const leave = (event) => { const word = wordOf(event); if (word) clear(word.closest(".rn-pair")); };
  document.addEventListener("pointerover", (event) => { const word = wordOf(event); if (word) show(word); });
  document.addEventListener("focusin", (event) => { const word = wordOf(event); if (word) show(word); });
  document.addEventListener("pointerout", leave);
  document.addEventListener("focusout", leave);
  document.addEventListener("keydown", (event) => {
    const word = wordOf(event);
    if (!word || !event.key.startsWith("Arrow")) return;
    const pair = word.closest(".rn-pair");
    const own = words(pair, word.closest(".rn-source") ? "source" : "target");
    let next;
    if (event.key === "ArrowUp" || event.key === "ArrowDown") {
      next = words(pair, event.key === "ArrowUp" ? "source" : "target")[0];
    } else {
      next = own[own.indexOf(word) + (event.key === "ArrowRight" ? 1 : -1)];
    }
    event.preventDefault();
    if (next) next.focus();
  });
  // Results are replaced while they grow; folded and unfolded parts stay as the visitor left them.
  const folds = new Map();
  document.addEventListener("click", (event) => {
    const summary = event.target instanceof Element ? event.target.closest("summary") : null;
    const fold = summary && summary.closest("details[data-key]");
    if (fold) folds.set(fold.dataset.key, !fold.open);
  });
  // The hint that a picture or table scrolls is for windows in which it does.
  const markWide = () => {
    for (const part of document.querySelectorAll(".rn-scroll")) part.classList.toggle("rn-wide", part.scrollWidth > part.clientWidth);
  };
  window.addEventListener("resize", markWide);
  document.addEventListener("toggle", markWide, true);
  new MutationObserver(() => {
    markWide();
    for (const fold of document.querySelectorAll("details[data-key]")) {
      const isOpen = folds.get(fold.dataset.key);
      if (isOpen !== undefined && fold.open !== isOpen) fold.open = isOpen;
    }
  }).observe(document, { childList: true, subtree: true });
})();
