// Draws every figure with Plotly in the colours of the page, light or dark.
(() => {
  "use strict";
  const figures = JSON.parse(document.getElementById("figures").textContent);
  const dark = window.matchMedia("(prefers-color-scheme: dark)");
  const root = document.documentElement;
  const colour = (name) => getComputedStyle(root).getPropertyValue(name).trim();

  function dressTrace(given, mode, page) {
    const { colour: own, ...trace } = structuredClone(given);
    trace.marker = { ...trace.marker, color: own[mode] };
    if (trace.line) trace.line.color = own[mode];
    if (trace.marker.pattern) {
      Object.assign(trace.marker.pattern, { fillmode: "overlay", fgcolor: page.card, fgopacity: 0.55 });
      trace.marker.line = { width: 0.5, color: page.card };
    }
    for (const name of ["error_x", "error_y"]) if (trace[name]) trace[name].color = page.ink;
    return trace;
  }

  function dressAxis(axis, page) {
    return {
      zeroline: false, automargin: true, ...axis,
      title: axis.title ? { ...axis.title, font: { size: 13, color: page.ink }, standoff: 10 } : undefined,
      spikecolor: page.soft, spikethickness: 1, spikedash: "dot",
      gridcolor: page.grid, linecolor: page.line, tickcolor: page.line,
      tickfont: { size: 12, color: page.soft },
    };
  }

  function dressed(spec) {
    const mode = dark.matches ? "dark" : "light";
    const page = Object.fromEntries(
      ["card", "ink", "soft", "line", "grid"].map((name) => [name, colour(`--${name}`)]));
    const layout = {
      ...spec.layout,
      xaxis: dressAxis(spec.layout.xaxis, page), yaxis: dressAxis(spec.layout.yaxis, page),
      paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
      font: { family: getComputedStyle(document.body).fontFamily, size: 13, color: page.ink },
      margin: { l: 60, r: 26, t: 30, b: 48 },
      legend: { orientation: "h", traceorder: "normal", x: 0, y: 1, yref: "paper", yanchor: "bottom", font: { size: 12.5 } },
      hoverlabel: { bgcolor: page.card, bordercolor: page.line, font: { color: page.ink, size: 13 }, align: "left", namelength: -1 },
      modebar: { bgcolor: "rgba(0,0,0,0)", color: page.soft, activecolor: page.ink },
    };
    return { data: spec.data.map((trace) => dressTrace(trace, mode, page)), layout };
  }

  function settings(key) {
    return {
      responsive: true, displaylogo: false, displayModeBar: true,
      // Named one by one: Plotly's own choice has a button that sends the data to its makers.
      modeBarButtons: [["toImage"], ["zoom2d", "pan2d", "zoomIn2d", "zoomOut2d", "resetScale2d"]],
      plotlyServerURL: "", showLink: false,
      toImageButtonOptions: { format: "svg", filename: key },
    };
  }

  async function draw() {
    for (const [key, spec] of Object.entries(figures)) {
      const { data, layout } = dressed(spec);
      await Plotly.react(document.getElementById(`plot-${key}`), data, layout, settings(key));
    }
  }

  root.classList.add("interactive");
  draw().then(
    () => { root.dataset.ready = "yes"; },
    (error) => { root.classList.remove("interactive"); throw error; },
  );
  dark.addEventListener("change", draw);
})();
