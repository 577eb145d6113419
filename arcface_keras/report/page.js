"use strict";
(() => {
  const form = document.getElementById("filter");
  const words = document.getElementById("words");
  const count = document.getElementById("count");
  const buttons = [...form.querySelectorAll("button")];
  const galleries = [...document.querySelectorAll("[data-gallery]")];
  const total = document.querySelectorAll(".card").length;
  let kind = "all";

  const apply = () => {
    const wanted = words.value.toLowerCase().split(/\s+/).filter(Boolean);
    let shown = 0;
    for (const gallery of galleries) {
      const chosen = kind === "all" || gallery.dataset.gallery === kind;
      let here = 0;
      for (const card of gallery.querySelectorAll(".card")) {
        card.hidden = !(chosen && wanted.every((word) => card.dataset.text.includes(word)));
        here += card.hidden ? 0 : 1;
      }
      gallery.hidden = !chosen || (here === 0 && wanted.length > 0);
      shown += here;
    }
    for (const button of buttons) {
      button.setAttribute("aria-pressed", String(button.dataset.kind === kind));
    }
    count.textContent = `${shown} of ${total} rows`;
  };

  const remember = () => {
    const state = new URLSearchParams();
    if (kind !== "all") state.set("rows", kind);
    if (words.value.trim()) state.set("words", words.value.trim());
    try {
      history.replaceState(null, "", `#${state.toString() || "galleries"}`);
    } catch { /* some viewers of local files forbid it, and the filter works without */ }
  };

  const fromAddress = () => {
    const state = new URLSearchParams(location.hash.slice(1));
    const asked = state.get("rows");
    if (asked === null && state.get("words") === null) return false;
    kind = buttons.some((button) => button.dataset.kind === asked) ? asked : "all";
    words.value = state.get("words") ?? "";
    return true;
  };

  form.addEventListener("submit", (event) => event.preventDefault());
  form.addEventListener("click", (event) => {
    const button = event.target.closest("button");
    if (!button) return;
    kind = button.dataset.kind;
    apply();
    remember();
  });
  words.addEventListener("input", () => { apply(); remember(); });
  addEventListener("hashchange", () => { if (fromAddress()) apply(); });

  form.hidden = false;
  const asked = fromAddress();
  apply();
  if (asked) document.getElementById("galleries").scrollIntoView();
})();
