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
    } catch (error) { /* the theme is switched, but not stored */ }
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

  // For printing, every card is unfolded; logs stay as they are.
  let unfolded = [];
  addEventListener("beforeprint", () => {
    unfolded = [...document.querySelectorAll("details.card:not([open])")].filter((one) => one.checkVisibility());
    for (const one of unfolded) one.open = true;
  });
  addEventListener("afterprint", () => {
    for (const one of unfolded) one.open = false;
  });

  const table = byId("jobs-table");
  if (!table) return;

  // Pages of jobs that have no card are packed, a few dozen in one; they are unpacked on demand.
  const packs = [...document.querySelectorAll("script.pages")].map((script) => (
    { first: Number(script.dataset.first), last: Number(script.dataset.last), script, pages: null }
  ));
  const unpacked = async (pack) => {
    const bytes = Uint8Array.from(atob(pack.script.textContent), (letter) => letter.charCodeAt(0));
    const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"));
    return JSON.parse(await new Response(stream).text());
  };
  const fill = async (body) => {
    const row = body.insertRow();
    row.className = "d";
    const cell = row.insertCell();
    cell.colSpan = heads.length;
    const page = document.createElement("div");
    cell.append(page);
    const number = Number(body.id.slice(1));
    const pack = packs.find((one) => one.first <= number && number <= one.last);
    try {
      pack.pages ||= unpacked(pack);
      page.innerHTML = (await pack.pages)[number]; // escaped when the report was written
    } catch (error) {
      page.textContent = "This browser cannot unpack the page of the job.";
    }
  };
  const search = byId("q");
  const chips = [...document.querySelectorAll("#toolbar .chip")];
  const heads = [...table.tHead.rows[0].cells];
  const rows = [...table.tBodies].map((body, order) => {
    const cells = body.rows[0].cells;
    return { body, order, cells, outcome: body.dataset.o, text: [0, 1, cells.length - 1].map((i) => cells[i].textContent).join(" ").toLowerCase() };
  });
  const ranks = ["failed", "infra", "outdated", "not_run", "skipped", "known", "passed"];
  const textColumns = { job: 0, device: heads.length - 1 };
  const collator = new Intl.Collator("en", { numeric: true });
  const state = { q: "", v: new Set(), s: "", j: "" };
  const firstShown = 400; // layout of thousands of rows at every key stroke would be slow
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
      if (missing) return missing; // jobs without a value are last in both orders
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
      if (open && target.rows.length === 1) fill(target);
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
    if (own && own.id === id && link.closest("th")) {
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
  byId("toolbar").addEventListener("submit", (event) => event.preventDefault());

  // Keys.
  const help = byId("keys");
  const keysOn = byId("keys-on");
  try {
    keysOn.checked = localStorage.getItem("farm-keys") !== "off";
  } catch (error) { /* storage may be forbidden */ }
  keysOn.addEventListener("change", () => {
    try {
      localStorage.setItem("farm-keys", keysOn.checked ? "on" : "off");
    } catch (error) { /* not stored */ }
  });
  byId("help").addEventListener("click", () => help.showModal());
  byId("keys-close").addEventListener("click", () => help.close());
  const show = (target, focus) => {
    target.scrollIntoView({ block: "start" });
    focus.focus({ preventScroll: true });
  };
  const step = (by) => {
    const cards = [...document.querySelectorAll("#failures > .card, #infra > .card")].map((card) => card.querySelector("summary"));
    if (!cards.length) return;
    const here = cards.findIndex((one) => one.parentElement.contains(document.activeElement));
    const next = cards[here < 0 ? (by > 0 ? 0 : cards.length - 1) : (here + by + cards.length) % cards.length];
    next.parentElement.open = true;
    show(next.parentElement, next);
  };
  const toSection = (id) => show(byId(id), byId(id).querySelector("a, button, input, [tabindex]") || byId("main"));
  const keys = {
    "/": () => {
      show(byId("jobs"), search);
      search.select();
    },
    "?": () => help.showModal(),
    n: () => step(1),
    p: () => step(-1),
    m: () => toSection("matrix"),
    j: () => toSection("jobs"),
    t: () => {
      scrollTo(0, 0);
      byId("main").focus({ preventScroll: true });
    },
  };
  const arrows = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0] };
  const move = (event) => {
    const cell = event.target.closest(".matrix td");
    const [down, right] = arrows[event.key];
    const row = cell.parentElement;
    const next = down ? row.parentElement.rows[row.sectionRowIndex + down]?.cells[cell.cellIndex] : row.cells[cell.cellIndex + right];
    const link = next?.querySelector("a");
    if (!link) return;
    event.preventDefault();
    link.focus();
  };
  document.addEventListener("keydown", (event) => {
    const editing = event.target.closest("input:not([type=checkbox]), textarea, select, [contenteditable]");
    const plain = !editing && !event.ctrlKey && !event.metaKey && !event.altKey && !help.open;
    if (plain && keysOn.checked && Object.hasOwn(keys, event.key)) {
      event.preventDefault();
      keys[event.key]();
    } else if (plain && event.key in arrows && event.target.closest(".matrix td")) {
      move(event);
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
