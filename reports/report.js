"use strict";
(() => {
  const byId = (id) => document.getElementById(id);
  const root = document.documentElement;

  // Theme: one click turns to the other side; back on the system's own side, the page follows the system again.
  const themeButton = byId("theme");
  const systemDark = matchMedia("(prefers-color-scheme: dark)");
  const systemTheme = () => (systemDark.matches ? "dark" : "light");
  const theme = () => root.dataset.theme || systemTheme();
  const labelTheme = () => {
    themeButton.textContent = theme() === "dark" ? "☀ Light" : "☾ Dark";
  };
  themeButton.addEventListener("click", () => {
    const next = theme() === "dark" ? "light" : "dark";
    if (next === systemTheme()) delete root.dataset.theme;
    else root.dataset.theme = next;
    try {
      if (root.dataset.theme) localStorage.setItem("farm-theme", next);
      else localStorage.removeItem("farm-theme");
    } catch (error) { /* not remembered, still switched */ }
    labelTheme();
  });
  systemDark.addEventListener("change", labelTheme);
  labelTheme();

  // Commands to copy.
  document.addEventListener("click", async (event) => {
    const button = event.target.closest("button.copy");
    if (!button) return;
    const code = button.previousElementSibling;
    let copied = true;
    try {
      await navigator.clipboard.writeText(code.textContent);
    } catch (error) {
      getSelection().selectAllChildren(code);
      copied = document.execCommand("copy");
    }
    button.textContent = copied ? "Copied" : "Press Ctrl+C";
    setTimeout(() => { button.textContent = "Copy"; }, 1500);
  });

  // Printed, every card and log is unfolded.
  let unfolded = [];
  addEventListener("beforeprint", () => {
    unfolded = [...document.querySelectorAll("details:not([open])")].filter((one) => !one.matches(".log"));
    for (const one of unfolded) one.open = true;
  });
  addEventListener("afterprint", () => {
    for (const one of unfolded) one.open = false;
  });

  const table = byId("jobs-table");
  if (!table) return;
  const search = byId("q");
  const chips = [...document.querySelectorAll("#toolbar .chip")];
  const heads = [...table.tHead.rows[0].cells];
  const rows = [...table.tBodies].map((body, order) => {
    const cells = body.rows[0].cells;
    return { body, order, cells, outcome: body.dataset.o, text: [0, 1, cells.length - 1].map((i) => cells[i].textContent).join(" ").toLowerCase() };
  });
  const ranks = ["failed", "stale", "infra", "not_run", "known", "skipped", "passed"];
  const textColumns = { job: 0, device: heads.length - 1 };
  const collator = new Intl.Collator("en", { numeric: true });
  const state = { q: "", v: new Set(), s: "", j: "" };
  const firstShown = 400; // laying out thousands of rows at every key stroke would be felt
  let limit = firstShown;
  let ordered = rows;

  const keyOf = (row, name, column) => {
    if (name in textColumns) return row.cells[column].textContent;
    if (name === "verdict") return ranks.indexOf(row.outcome);
    const value = row.cells[column].dataset.v;
    return value === undefined ? NaN : Number(value);
  };

  const sort = () => {
    const descending = state.s.startsWith("-");
    const name = descending ? state.s.slice(1) : state.s;
    const column = heads.findIndex((head) => head.dataset.k === name);
    heads.forEach((head, i) => {
      head.setAttribute("aria-sort", i !== column ? "none" : descending ? "descending" : "ascending");
    });
    const keyed = rows.map((row) => [column < 0 ? 0 : keyOf(row, name, column), row]);
    const sign = descending ? -1 : 1;
    keyed.sort(([a, rowA], [b, rowB]) => {
      const missing = Number(Number.isNaN(a)) - Number(Number.isNaN(b));
      if (missing) return missing; // jobs without the number come last, whichever way the order goes
      const order = typeof a === "string" ? collator.compare(a, b) : a < b ? -1 : a > b ? 1 : 0;
      return sign * order || rowA.order - rowB.order;
    });
    const sorted = document.createDocumentFragment();
    ordered = keyed.map(([, row]) => row);
    for (const row of ordered) sorted.append(row.body);
    table.append(sorted);
  };

  const filter = () => {
    const words = state.q.toLowerCase().split(/\s+/).filter(Boolean);
    let found = 0;
    for (const row of ordered) {
      const fits = (!state.v.size || state.v.has(row.outcome)) && words.every((word) => row.text.includes(word));
      row.body.hidden = !fits || found >= limit;
      found += fits;
    }
    byId("shown").textContent = found === rows.length ? `${found} jobs` : `${found} of ${rows.length} jobs`;
    byId("none").hidden = found > 0;
    byId("more").hidden = found <= limit;
    byId("more").firstElementChild.textContent = `The first ${limit} are shown: show all ${found}`;
    for (const chip of chips) chip.setAttribute("aria-pressed", String(state.v.has(chip.dataset.o)));
  };

  const remember = () => {
    const parameters = new URLSearchParams();
    if (state.q) parameters.set("q", state.q);
    if (state.v.size) parameters.set("v", [...state.v].join(","));
    if (state.s) parameters.set("sort", state.s);
    if (state.j) parameters.set("job", state.j);
    const fragment = parameters.toString();
    history.replaceState(null, "", fragment ? `#${fragment}` : location.pathname + location.search);
  };

  const unfold = (id, open) => {
    const target = byId(id);
    if (!target) return null;
    if (target.matches("details")) {
      target.open = open;
    } else {
      target.classList.toggle("open", open);
      target.querySelector("a").setAttribute("aria-expanded", String(open));
    }
    return target;
  };

  const goTo = (id) => {
    const target = unfold(id, true);
    if (!target) return;
    if (target.hidden) {
      Object.assign(state, { q: "", v: new Set() });
      search.value = "";
      filter();
      target.hidden = false;
    }
    target.scrollIntoView({ block: target.matches("tbody") ? "center" : "start" });
    const focus = target.querySelector("summary, a");
    focus.focus({ preventScroll: true });
  };

  document.addEventListener("click", (event) => {
    const link = event.target.closest("a[href^='#j']");
    if (!link || !/^#j\d+$/.test(link.hash) || event.ctrlKey || event.metaKey || event.shiftKey) return;
    event.preventDefault();
    const id = link.hash.slice(1);
    const own = link.closest("tbody");
    if (own && own.id === id) {
      const open = !own.classList.contains("open");
      unfold(id, open);
      state.j = open ? id : "";
    } else {
      goTo(id);
      state.j = id;
    }
    remember();
  });

  let typing = 0;
  search.addEventListener("input", () => {
    clearTimeout(typing);
    typing = setTimeout(() => {
      state.q = search.value.trim();
      filter();
      remember();
    }, 60);
  });
  for (const chip of chips) {
    chip.addEventListener("click", () => {
      const outcome = chip.dataset.o;
      if (!state.v.delete(outcome)) state.v.add(outcome);
      filter();
      remember();
    });
  }
  heads.forEach((head) => {
    head.querySelector("button").addEventListener("click", () => {
      const name = head.dataset.k;
      const turns = [name, `-${name}`, ""];
      state.s = turns[(turns.indexOf(state.s) + 1) % turns.length];
      sort();
      filter();
      remember();
    });
  });
  byId("toolbar").addEventListener("reset", () => {
    Object.assign(state, { q: "", v: new Set(), s: "", j: "" });
    sort();
    filter();
    remember();
  });
  const showAll = () => {
    limit = Infinity;
    filter();
  };
  byId("more").firstElementChild.addEventListener("click", showAll);
  addEventListener("beforeprint", showAll);
  byId("toolbar").addEventListener("submit", (event) => event.preventDefault());
  document.addEventListener("keydown", (event) => {
    const editing = event.target.closest("input, textarea, select, [contenteditable]");
    if (event.key === "/" && !editing && !event.ctrlKey && !event.metaKey && !event.altKey) {
      event.preventDefault();
      byId("jobs").scrollIntoView({ block: "start" });
      search.focus({ preventScroll: true });
      search.select();
    } else if (event.key === "Escape" && event.target === search) {
      search.value = "";
      state.q = "";
      filter();
      remember();
    }
  });

  const restore = () => {
    const fragment = location.hash.slice(1);
    if (!fragment.includes("=")) {
      filter();
      if (/^j\d+$/.test(fragment)) goTo(fragment);
      return;
    }
    const parameters = new URLSearchParams(fragment);
    state.q = parameters.get("q") || "";
    state.v = new Set((parameters.get("v") || "").split(",").filter((one) => ranks.includes(one)));
    const wanted = parameters.get("sort") || "";
    state.s = heads.some((head) => head.dataset.k === wanted.replace(/^-/, "")) ? wanted : "";
    const job = parameters.get("job") || "";
    state.j = /^j\d+$/.test(job) ? job : "";
    search.value = state.q;
    if (state.s) sort();
    filter();
    if (state.j) goTo(state.j);
    else byId("jobs").scrollIntoView({ block: "start" });
  };
  addEventListener("hashchange", restore);
  restore();
})();
