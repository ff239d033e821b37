"use strict";
(() => {
  const grid = document.getElementById("grid");
  if (!grid) return;
  const nightlyRuns = grid.dataset.nightlyRuns.split(" ");
  const days = grid.dataset.days.split(" ");
  const kinds = {
    p: ["passed", "", "passed"], f: ["failed", "✗", "failed"], k: ["known", "◇", "known issue"],
    i: ["infra", "△", "infra"], s: ["skipped", "○", "skipped"], n: ["not_run", "·", "not run"],
  };

  // Cells become links when their row comes near the window: a hundred thousand links at once would be slow.
  const fill = (row) => {
    const place = row.cells[2];
    const job = row.cells[0].firstElementChild.getAttribute("href");
    const found = [...row.dataset.c].map((letter, column) => {
      const kind = kinds[letter];
      const cell = document.createElement(kind ? "a" : "span");
      if (kind) {
        cell.className = kind[0];
        cell.href = `${job}?nightly_run=${encodeURIComponent(nightlyRuns[column])}`;
        cell.title = `${kind[2]}, ${days[column]}`;
        cell.setAttribute("aria-label", cell.title);
        cell.textContent = kind[1];
        cell.tabIndex = -1;
      }
      return cell;
    });
    const first = found.find((cell) => cell.href);
    if (first) first.tabIndex = 0;
    place.replaceChildren(...found);
  };
  const near = new IntersectionObserver((entries) => {
    for (const entry of entries) {
      if (entry.isIntersecting) {
        near.unobserve(entry.target);
        fill(entry.target);
      }
    }
  }, { rootMargin: "600px" });
  for (const row of grid.tBodies[0].rows) near.observe(row);

  const steps = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0] };
  grid.addEventListener("keydown", (event) => {
    const cell = event.target.closest("tbody .cells > a");
    if (!cell || !(event.key in steps) || event.ctrlKey || event.metaKey || event.altKey) return;
    event.preventDefault();
    const [down, right] = steps[event.key];
    let row = cell.closest("tr");
    let column = [...cell.parentElement.children].indexOf(cell);
    for (;;) {
      row = down ? row.parentElement.rows[row.sectionRowIndex + down] : row;
      column += right;
      if (!row) return;
      if (!row.cells[2].querySelector("a")) fill(row);
      const next = row.cells[2].children[column];
      if (!next) return;
      if (next.href) {
        for (const one of next.parentElement.querySelectorAll("a")) one.tabIndex = one === next ? 0 : -1;
        next.focus();
        return;
      }
    }
  });
})();
