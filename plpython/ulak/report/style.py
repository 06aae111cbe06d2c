"""How ulak.report() looks, in light and in dark."""

STYLE = """
:root {
  --ground: #f4f3ef; --panel: #ffffff; --ink: #1d2129; --quiet: #6a6f78; --line: #e4e2db; --grid: #ecebe5;
  --delivered: #2f6fde; --failed: #d9483b; --p95: #b06a10; --p50: #2f6fde; --waiting: #6d5bd0;
  --good: #1c8a57; --warn: #a96a00; --bad: #c8372b; --calm: #6a6f78;
  --good-soft: #e2f3ea; --warn-soft: #fbf0d9; --bad-soft: #fce6e3; --calm-soft: #eeede8; --code: #f6f5f1;
}
@media (prefers-color-scheme: dark) {
  :root {
    --ground: #0f1115; --panel: #171a20; --ink: #e7e8ea; --quiet: #949aa5; --line: #262b34; --grid: #20242c;
    --delivered: #6ea0ff; --failed: #ff7a6b; --p95: #f0b35c; --p50: #6ea0ff; --waiting: #a99bff;
    --good: #56cf95; --warn: #f0b648; --bad: #ff8577; --calm: #949aa5;
    --good-soft: #14291f; --warn-soft: #2d2413; --bad-soft: #331a18; --calm-soft: #22262e; --code: #11141a;
  }
}
* { box-sizing: border-box; margin: 0; }
body {
  background: var(--ground); color: var(--ink); -webkit-font-smoothing: antialiased;
  font: 14px/1.45 system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", "DejaVu Sans", sans-serif;
}
main { max-width: 1200px; margin: 0 auto; padding: 32px 24px 48px; display: grid; gap: 16px; }
main, .pair, .stack { grid-template-columns: minmax(0, 1fr); }
header {
  display: flex; flex-wrap: wrap; align-items: baseline; justify-content: space-between; gap: 4px 24px; padding:
  0 4px;
}
h1 { font-size: 24px; letter-spacing: -0.02em; display: flex; align-items: baseline; gap: 10px; }
h1 .mark { width: 20px; height: 20px; align-self: center; fill: var(--delivered); }
h1 .fold { stroke: var(--ground); stroke-width: 1.4; fill: none; }
h1 .database { font-weight: 400; color: var(--quiet); letter-spacing: 0; }
h2 { font-size: 15px; letter-spacing: -0.005em; }
h2 .quiet { font-weight: 400; margin-left: 10px; font-size: 13px; }
h3 { font-size: 12px; font-weight: 500; color: var(--quiet); }
.quiet { color: var(--quiet); }
small { font-size: 12px; }
.pair, .stack { display: grid; gap: 16px; align-items: start; }
@media (min-width: 900px) { .pair { grid-template-columns: repeat(2, minmax(0, 1fr)); } }
.panel, .tile, .verdict { background: var(--panel); border: 1px solid var(--line); border-radius: 12px; }
.panel { padding: 16px 18px 14px; }
.title {
  display: flex; flex-wrap: wrap; align-items: baseline; justify-content: space-between; gap: 4px 16px;
  margin-bottom: 10px;
}
.verdict { padding: 16px 18px; border-left: 5px solid var(--calm); }
.verdict.good { border-left-color: var(--good); } .verdict.warn { border-left-color: var(--warn); }
.verdict.bad { border-left-color: var(--bad); }
.findings { list-style: none; padding: 0; display: grid; gap: 7px; margin-top: 12px; }
.findings summary, .findings li p {
  display: grid; grid-template-columns: 110px minmax(0, 1fr) 14px; gap: 12px; align-items: baseline;
}
.findings summary { cursor: pointer; list-style: none; }
.findings summary::-webkit-details-marker { display: none; }
.findings summary::after { content: "+"; color: var(--quiet); text-align: right; }
.findings details[open] summary::after { content: "\\2212"; }
.findings .pill { justify-self: start; }
.findings .more { grid-column: 2; color: var(--quiet); }
pre {
  margin: 5px 26px 5px 122px; background: var(--code); border: 1px solid var(--line); border-radius: 8px; padding:
  6px 10px;
  white-space: pre-wrap; overflow-wrap: anywhere;
}
@media (max-width: 600px) {
  .findings summary, .findings li p { grid-template-columns: minmax(0, 1fr) 14px; gap: 3px 8px; }
  .findings .pill { grid-column: 1 / -1; }
  .findings .more { grid-column: 1; }
  pre { margin-left: 0; }
}
code { font: 12.5px/1.4 ui-monospace, "SF Mono", Menlo, Consolas, "DejaVu Sans Mono", monospace; }
.pill {
  display: inline-block; padding: 1px 9px; border-radius: 99px; font-size: 12px; font-weight: 500; white-space:
  nowrap;
  background: var(--calm-soft); color: var(--calm);
}
.pill.good { background: var(--good-soft); color: var(--good); }
.pill.warn { background: var(--warn-soft); color: var(--warn); }
.pill.bad { background: var(--bad-soft); color: var(--bad); }
.tiles { display: grid; gap: 12px; grid-template-columns: repeat(auto-fit, minmax(165px, 1fr)); }
.tile { padding: 13px 16px 12px; }
.tile .value {
  font-size: 26px; line-height: 1.25; font-weight: 600; letter-spacing: -0.02em; font-variant-numeric:
  tabular-nums;
}
.tile .quiet { font-size: 12.5px; }
.tile.warn .value, b.warn { color: var(--warn); } .tile.bad .value { color: var(--bad); }
svg { display: block; }
.chart { width: 100%; height: auto; }
.chart.wide { min-width: 720px; }
.grid { stroke: var(--grid); } .axis { stroke: var(--line); }
.tick { fill: var(--quiet); font-size: 11px; font-variant-numeric: tabular-nums; }
.touch { fill: transparent; }
.column:hover .touch { fill: var(--ink); fill-opacity: 0.06; }
rect.delivered { fill: var(--delivered); } rect.failed { fill: var(--failed); }
.line { fill: none; stroke-width: 1.8; stroke-linejoin: round; stroke-linecap: round; }
.line.p95 { stroke: var(--p95); } .line.p50 { stroke: var(--p50); } .line.waiting { stroke: var(--waiting); }
.dot.p95 { fill: var(--p95); } .dot.p50 { fill: var(--p50); } .dot.waiting { fill: var(--waiting); }
.area { fill-opacity: 0.13; }
.area.p95 { fill: var(--p95); } .area.p50 { fill: var(--p50); } .area.waiting { fill: var(--waiting); }
.sparkline { width: 120px; height: 26px; }
.spark { fill: var(--delivered); } .spark.none { fill: var(--line); }
.legend { display: flex; gap: 14px; font-size: 12.5px; color: var(--quiet); }
.key { display: inline-block; width: 9px; height: 9px; border-radius: 3px; margin-right: 6px; }
.key.delivered, .meter .delivered { background: var(--delivered); }
.key.failed, .meter .failed { background: var(--failed); }
.key.p50 { background: var(--p50); } .key.p95 { background: var(--p95); } .key.waiting { background: var(--waiting); }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }
th {
  text-align: left; font-size: 12px; font-weight: 500; color: var(--quiet); padding: 0 12px 7px 0; white-space:
  nowrap;
}
td { padding: 8px 12px 8px 0; border-top: 1px solid var(--line); vertical-align: middle; white-space: nowrap; }
th:last-child, td:last-child { padding-right: 0; }
th.n, td.n { text-align: right; }
td.n .meter { margin: 3px 0 0 auto; width: 44px; }
td.name .quiet { margin-left: 8px; font-size: 12px; }
td.name b { font-weight: 600; }
th.spaced, td.spaced { padding-left: 10px; }
td.wide { width: 40%; }
.error { color: var(--quiet); font-size: 12.5px; }
td.error { max-width: 0; width: 34%; min-width: 180px; }
td.error span, .causes .error { display: block; overflow: hidden; text-overflow: ellipsis; white-space: nowrap; }
.meter { display: block; height: 5px; border-radius: 99px; background: var(--calm-soft); overflow: hidden; }
.meter span { display: block; height: 100%; border-radius: 99px; }
.causes { list-style: none; padding: 0; display: grid; gap: 13px; grid-template-columns: minmax(0, 1fr); }
.causes b { font-weight: 600; }
.amount { display: grid; grid-template-columns: minmax(0, 1fr) auto auto; gap: 12px; align-items: center; }
.chips { display: flex; flex-wrap: wrap; gap: 7px; padding-bottom: 4px; }
.chip {
  border: 1px solid var(--line); border-radius: 99px; padding: 2px 11px 2px 9px; font-size: 12.5px; white-space:
  nowrap;
}
.chip b { font-weight: 500; margin-left: 6px; color: var(--warn); }
.light {
  display: inline-block; width: 7px; height: 7px; border-radius: 99px; margin-right: 7px; background:
  var(--calm);
}
.light.good { background: var(--good); }
.light.warn { background: var(--warn); }
.light.bad { background: var(--bad); }
.empty { color: var(--quiet); padding: 14px 0 10px; }
footer { color: var(--quiet); font-size: 12.5px; padding: 4px; }
"""
