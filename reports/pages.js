"use strict";
(() => {
  // Filters: an address contains only chosen values.
  for (const form of document.querySelectorAll("form.filters")) {
    form.addEventListener("submit", () => {
      const empty = [...form.elements].filter((field) => field.name && !field.value);
      for (const field of empty) field.disabled = true;
      setTimeout(() => { for (const field of empty) field.disabled = false; });
    });
  }

  // Files are fetched when a reader unfolds them; text is shown as text.
  for (const one of document.querySelectorAll("details[data-view]")) {
    one.addEventListener("toggle", async () => {
      if (!one.open || one.querySelector(".shown")) return;
      const place = document.createElement("div");
      place.className = "shown";
      one.append(place);
      try {
        const answer = await fetch(one.dataset.view);
        const kind = answer.headers.get("Content-Type") || "";
        if (!answer.ok) {
          place.textContent = answer.status === 415 ? "Neither text nor an image: download it." : "Not on this machine, or pruned.";
        } else if (kind.startsWith("image/")) {
          const image = document.createElement("img");
          image.src = one.dataset.view;
          image.alt = one.querySelector("summary").textContent.trim();
          place.append(image);
        } else {
          const text = document.createElement("pre");
          text.tabIndex = 0;
          text.textContent = await answer.text();
          place.append(text);
        }
      } catch (error) {
        place.textContent = "No answer from the server.";
      }
    });
  }

  const note = document.getElementById("live-note");
  if (!note || note.dataset.live !== "yes") return;
  const region = document.getElementById("live");
  const everyMs = 2000;
  const longestMs = 60000;
  const shownRuns = new Map([...document.querySelectorAll("[data-run]")].map((one) => [one.dataset.run, one]));
  const shownDevices = new Map([...document.querySelectorAll("[data-device]")].map((one) => [one.dataset.device, one]));
  const healthWords = { healthy: ["passed", "✓ healthy"], suspect: ["infra", "△ suspect"], quarantined: ["failed", "✗ quarantined"] };
  const seen = { runs: null, devices: null };
  let waitMs = everyMs;
  let timer = 0;

  const put = (place, text) => { if (place && place.textContent !== text) place.textContent = text; };
  const say = (text) => {
    // A screen reader announces each message once; the newest stays visible.
    region.textContent = text;
  };

  const showRun = (run) => {
    const row = shownRuns.get(run.run_id);
    if (!row) return;
    const bar = row.querySelector(".js-progress");
    if (bar) {
      bar.max = Math.max(run.planned, 1);
      bar.value = Math.min(run.done, run.planned);
      put(row.querySelector(".js-progress-text"), run.text);
    }
    if (run.finished_ms !== null && bar) {
      const place = row.querySelector(".js-ended");
      const passed = run.exit_code === 0;
      const end = document.createElement("span");
      end.className = `v ${passed ? "passed" : run.exit_code === 1 ? "failed" : "infra"}`;
      end.textContent = passed ? "✓ passed" : run.exit_code === 1 ? "✗ failed" : `△ exit code ${run.exit_code}`;
      if (place && place.textContent !== end.textContent) place.replaceChildren(end);
    }
  };

  const showDevice = (device) => {
    const row = shownDevices.get(device.id);
    if (!row) return;
    const state = row.querySelector(".js-state");
    if (state) {
      put(state, device.state);
      state.className = `js-state state ${device.state}`;
    }
    const held = row.querySelector(".js-held");
    put(held, device.held || held?.dataset.nobody || "");
    const health = row.querySelector(".js-health");
    const [kind, words] = healthWords[device.health] || ["", device.health];
    if (health && health.textContent !== words) {
      const word = document.createElement("span");
      word.className = `v ${kind}`;
      word.textContent = words;
      health.replaceChildren(word);
    }
  };

  const changes = (answer) => {
    const found = [];
    const runs = new Map(answer.runs.map((one) => [one.run_id, one.finished_ms !== null]));
    const devices = new Map(answer.devices.map((one) => [one.id, one.health]));
    if (seen.runs) {
      for (const [id, ended] of runs) {
        if (!seen.runs.has(id)) found.push(`run ${id} has begun`);
        else if (ended && !seen.runs.get(id)) found.push(`run ${id} has ended`);
      }
      for (const [id, health] of devices) {
        if (seen.devices.has(id) && seen.devices.get(id) !== health) found.push(`device ${id} is ${health}`);
      }
    }
    seen.runs = runs;
    seen.devices = devices;
    return found;
  };

  const look = async () => {
    timer = 0;
    if (document.hidden) return;
    try {
      const answer = await fetch("/api/v1/progress", { cache: "no-store", signal: AbortSignal.timeout(10000) });
      if (answer.status === 401) {
        put(note, "Live updates have ended: log in again.");
        return;
      }
      if (!answer.ok) throw new Error(String(answer.status));
      const found = await answer.json();
      found.runs.forEach(showRun);
      found.devices.forEach(showDevice);
      const said = changes(found);
      if (said.length) say(`${said.slice(0, 3).join(", ")}${said.length > 3 ? `, and ${said.length - 3} more` : ""}. Reload to see all.`);
      waitMs = everyMs;
      put(note, "Live.");
    } catch (error) {
      waitMs = Math.min(2 * waitMs, longestMs);
      put(note, "No answer from the server: this page may be out of date.");
    }
    plan();
  };
  const plan = () => {
    if (!timer && !document.hidden) timer = setTimeout(look, waitMs);
  };

  document.addEventListener("visibilitychange", () => {
    clearTimeout(timer);
    timer = 0;
    if (!document.hidden) look();
  });
  addEventListener("pageshow", (event) => { if (event.persisted) look(); });
  look();
})();
