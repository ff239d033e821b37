"use strict";
(() => {
  const figures = [...document.querySelectorAll("figure[data-plot]")];
  if (!figures.length || !window.Plotly) return;
  // Okabe and Ito's colours differ for every kind of colour vision.
  const colours = ["#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#7f7f7f", "#b8a800"];
  const dashes = ["solid", "dash", "dot", "dashdot"];
  const symbols = ["circle", "square", "diamond", "triangle-up", "cross", "star"];
  const kinds = { toolchain: "T", SDK: "S", firmware: "F", device: "D", case: "C" };
  // Custom properties keep `light-dark()`; a probe's colour is resolved.
  const probe = document.createElement("span");
  probe.hidden = true;
  document.body.append(probe);
  const colour = (name) => {
    probe.style.color = `var(${name})`;
    return getComputedStyle(probe).color;
  };
  // Plotly reads tags in texts.
  const plain = (text) => String(text).replaceAll("&", "&amp;").replaceAll("<", "&lt;");
  const number = (value) => Number(value.toPrecision(5)).toString();
  // Plotly would show a Date in the reader's time zone; tables and titles are in UTC.
  const utc = (ms) => new Date(ms).toISOString();
  const day = (ms) => utc(ms).slice(0, 16).replace("T", " ");

  // Jobs of one case are labelled with their targets.
  const nameOf = (plot, series) => {
    const cases = new Set(plot.series.map((one) => one.job_id.split("[")[0]));
    const kinds = new Set(plot.series.map((one) => one.device_kind));
    const name = cases.size > 1 ? series.job_id : series.job_id.slice([...cases][0].length).replace(/^\[|\]$/g, "");
    return kinds.size > 1 ? `${name} ${series.device_kind}` : name;
  };
  const traces = (plot) => {
    const found = [];
    plot.series.forEach((series, place) => {
      const name = nameOf(plot, series);
      const paint = colours[place % colours.length];
      const of = (local) => series.points.filter((point) => point.local === local);
      for (const local of [false, true]) {
        const points = of(local);
        if (!points.length) continue;
        found.push({
          name: plain(local ? `${name}, local runs` : name),
          x: points.map((point) => utc(point.time_ms)),
          y: points.map((point) => point.value),
          customdata: points.map((point) => [series.job_id, point.run_id]),
          text: points.map((point) => [
            `<b>${number(point.value)} ${plain(plot.unit)}</b>`, `run ${plain(point.run_id)}${local ? ", local" : ""}`, day(point.time_ms),
            point.commit ? `commit ${plain(point.commit.slice(0, 10))}` : "", `${point.n} sample${point.n === 1 ? "" : "s"}`,
            point.device ? `on ${plain(point.device)}` : "", point.failed ? "failed" : "",
          ].filter(Boolean).join("<br>")),
          hovertemplate: `%{text}<extra></extra>`,
          mode: local ? "markers" : "lines+markers",
          line: { color: paint, dash: dashes[Math.floor(place / colours.length) % dashes.length], width: 1.5 },
          marker: {
            color: paint, size: points.map((point) => (point.failed ? 10 : 6)),
            symbol: points.map((point) => (point.failed ? "x" : symbols[place % symbols.length] + (local ? "-open" : ""))),
          },
        });
      }
      series.levels.forEach((level, at) => found.push({
        name: "level", x: [utc(level.from_ms), utc(level.to_ms)], y: [level.value, level.value], mode: "lines",
        line: { color: paint, width: 4 }, opacity: 0.35, showlegend: false, hoverinfo: "skip", legendgroup: `levels${at}`,
      }));
    });
    const marked = plot.alerts.map((alert) => {
      const series = plot.series.find((one) => one.job_id === alert.job_id && one.points.some((point) => point.run_id === alert.run_id));
      return series && [alert, series.points.find((point) => point.run_id === alert.run_id)];
    }).filter(Boolean);
    if (marked.length) {
      found.push({
        name: "alerts", mode: "markers", x: marked.map(([, point]) => utc(point.time_ms)), y: marked.map(([, point]) => point.value),
        text: marked.map(([alert]) => `<b>alert ${alert.id}</b><br>${plain(alert.text)}`), hovertemplate: "%{text}<extra></extra>",
        customdata: marked.map(([alert]) => ["alert", String(alert.id)]),
        marker: { color: colour("--failed"), size: 13, symbol: "triangle-down", line: { color: colour("--paper"), width: 1 } },
      });
    }
    return found;
  };

  // Events closer than 1/40 of the time range are one mark.
  const timesOf = (plot) => {
    const times = plot.series.flatMap((series) => series.points.map((point) => point.time_ms));
    return [Math.min(...times), Math.max(...times)];
  };
  const together = (plot) => {
    const [first, last] = timesOf(plot);
    const near = (last - first) / 40;
    const found = [];
    for (const event of plot.events) {
      const before = found[found.length - 1];
      if (before && event.time_ms - before.time_ms <= near) before.all.push(event);
      else found.push({ time_ms: event.time_ms, all: [event] });
    }
    return found;
  };

  const layout = (plot, narrow) => {
    const soft = colour("--soft");
    const line = colour("--line");
    const axis = { gridcolor: line, linecolor: soft, zerolinecolor: line, tickcolor: soft, color: soft, automargin: true };
    const events = together(plot);
    const times = timesOf(plot);
    const room = Math.max(0, 3600000 - (times[1] - times[0])) / 2;
    return {
      margin: { l: 10, r: 10, t: narrow ? 24 : 44, b: 10 }, paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
      font: { family: getComputedStyle(document.body).fontFamily, color: colour("--ink"), size: 12 },
      xaxis: { ...axis, type: "date", title: { text: "time (UTC)", standoff: 8 }, nticks: narrow ? 3 : 8,
        ...(room ? { range: [utc(times[0] - room), utc(times[1] + room)] } : {}) },
      yaxis: { ...axis, title: { text: plot.unit ? `${plot.metric} (${plot.unit})` : plot.metric, standoff: 14 }, rangemode: "normal" },
      hovermode: "closest", dragmode: narrow ? "pan" : "zoom",
      hoverlabel: { bgcolor: colour("--raised"), bordercolor: soft, font: { color: colour("--ink") }, align: "left" },
      showlegend: plot.series.length > 1, legend: { orientation: "h", yref: "container", y: 0, yanchor: "bottom", font: { size: 11 } },
      modebar: { bgcolor: "rgba(0,0,0,0)", color: soft, activecolor: colour("--ink") },
      shapes: events.map((event) => ({
        type: "line", xref: "x", yref: "paper", x0: utc(event.time_ms), x1: utc(event.time_ms), y0: 0, y1: 1,
        line: { color: soft, width: 1, dash: "dot" },
      })),
      annotations: events.map((event) => ({
        x: utc(event.time_ms), y: 1, xref: "x", yref: "paper", yanchor: "bottom", showarrow: false,
        text: [...new Set(event.all.map((one) => kinds[one.kind]))].join(""),
        hovertext: event.all.slice(0, 12).map((one) => plain(`${day(one.time_ms)} ${one.kind}: ${one.text}`)).join("<br>"), font: { color: soft, size: 11 }, captureevents: true,
      })),
    };
  };

  const small = matchMedia("(max-width: 639px)");
  const draw = (figure) => {
    const plot = JSON.parse(document.getElementById(figure.dataset.plot).textContent);
    const place = figure.querySelector(".chart");
    const narrow = small.matches;
    // The style sheet has the heights: Plotly loses its own when the window is resized.
    place.classList.toggle("with-legend", plot.series.length > 1);
    place.style.setProperty("--series", plot.series.length);
    const settings = {
      responsive: true, displaylogo: false, scrollZoom: false, displayModeBar: !narrow,
      modeBarButtonsToRemove: ["select2d", "lasso2d", "autoScale2d", "toImage"],
    };
    window.Plotly.react(place, traces(plot), layout(plot, narrow), settings);
    if (place.dataset.ready) return;
    place.dataset.ready = "yes";
    place.on("plotly_click", (event) => {
      const [job, run] = event.points[0].customdata || [];
      if (job === "alert") location.href = `/alerts/${run}`;
      else if (job) location.href = `/jobs/${encodeURIComponent(job)}?run=${encodeURIComponent(run)}`;
    });
  };
  const all = () => figures.forEach(draw);
  all();
  // Colours of a chart are fixed when it is drawn.
  new MutationObserver(all).observe(document.documentElement, { attributes: true, attributeFilter: ["data-theme"] });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", all);
  small.addEventListener("change", all);
})();
