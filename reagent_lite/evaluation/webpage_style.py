"""The report page's style sheet: one column on a phone, light and dark, ink on paper in print.

Series begin with blue and orange of Okabe and Ito (https://jfly.uni-koeln.de/color/). The others were searched for:
[m] any two are at least 28 apart in CIELAB, also as seen without red, green or blue cones (Machado, Oliveira &
Fernandes 2009).
"""

_LIGHT = """--ground: #ffffff; --card: #f6f7f9; --ink: #1b1f24; --soft: #57606a; --rule: #d4d9df;
  --c0: #0072b2; --c1: #d55e00; --c2: #49005b; --c3: #9b5cff; --c4: #7e0803; --c5: #bf7483; --c6: #1b1f24;
  --c7: #0d00b8; --good: #00795a; --unclear: #8a6400; --bad: #7a1200; --mark: #0072b2;"""
_DARK = """--ground: #14171b; --card: #1d2127; --ink: #e8eaed; --soft: #a4abb5; --rule: #3a414b;
  --c0: #56b4e9; --c1: #e69f00; --c2: #437f5b; --c3: #ca00f8; --c4: #c5af69; --c5: #c23e00; --c6: #e8eaed;
  --c7: #79648d; --good: #2fd0a3; --unclear: #ffd75e; --bad: #e8663c; --mark: #56b4e9;"""
_PAPER = "color-scheme: light; --ground: #fff; --card: #fff; --ink: #000; --soft: #333; --rule: #999;"
_DASHES = ("none", "7 4", "2 3", "9 3 2 3") * 2

_PAGE = """
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 1120px; padding: 16px; background: var(--ground); color: var(--ink);
  font: 16px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "DejaVu Sans", sans-serif; overflow-wrap: anywhere; }
:focus-visible { outline: 3px solid var(--c0); outline-offset: 2px; }
h1 { font-size: 1.6rem; line-height: 1.25; margin: 8px 0 16px; }
h2 { font-size: 1.25rem; margin: 40px 0 12px; padding-top: 12px; border-top: 1px solid var(--rule); }
h3 { font-size: 1rem; margin: 4px 0 8px; }
p { margin: 6px 0; max-width: 75ch; }
.whole { white-space: nowrap; }
header > p { font-weight: 600; }
a { color: var(--c0); }
nav ul { display: flex; flex-wrap: wrap; gap: 4px 18px; padding: 0; margin: 16px 0 0; list-style: none; }
.verdict { border-left: 8px solid; border-radius: 6px; background: var(--card); padding: 12px 16px; margin: 0 0 12px; }
.verdict strong { display: block; font-size: 1.3rem; line-height: 1.3; }
.verdict span { color: var(--soft); font-size: .85rem; }
.verdict p { color: var(--soft); font-size: .95rem; }
.verdict.good { border-color: var(--good); } .verdict.unclear { border-color: var(--unclear); }
.verdict.bad { border-color: var(--bad); }
.cards { display: grid; gap: 16px; grid-template-columns: repeat(auto-fill, minmax(min(100%, 400px), 1fr)); }
.card { min-width: 0; margin: 0; background: var(--card); border: 1px solid var(--rule); border-radius: 8px;
  padding: 12px; }
dl.facts { display: grid; gap: 10px 20px; margin: 16px 0;
  grid-template-columns: repeat(auto-fill, minmax(160px, 1fr)); }
dl.facts div { min-width: 0; } dl.facts .long { grid-column: span 2; }
dl.facts dt { color: var(--soft); font-size: .85rem; } dl.facts dd { margin: 0; }
.scroll { overflow-x: auto; max-width: 100%; }
table { border-collapse: collapse; font-size: .9rem; font-variant-numeric: tabular-nums; margin: 8px 0; width: 100%; }
caption { text-align: left; font-weight: 600; padding: 4px 0; }
th, td { text-align: left; vertical-align: top; padding: 5px 14px 5px 0; border-bottom: 1px solid var(--rule);
  overflow-wrap: normal; }
td.figure, th.figure { text-align: right; } td.figure span { white-space: nowrap; }
td.words { min-width: 11em; } td.short { white-space: nowrap; }
td.long, th.long { overflow-wrap: anywhere; min-width: 11em; }
tbody th { font-weight: 500; }
code, pre { font: .85em/1.45 ui-monospace, "DejaVu Sans Mono", monospace; }
pre { white-space: pre-wrap; background: var(--card); padding: 12px; border-radius: 8px; }
summary { cursor: pointer; padding: 4px 0; color: var(--c0); }
ul.legend { list-style: none; margin: 6px 0; padding: 0; display: flex; flex-wrap: wrap; gap: 2px 16px;
  font-size: .85rem; }
ul.legend li { display: flex; align-items: center; gap: 6px; min-width: 0; }
svg.chart { display: block; width: 100%; height: auto; max-width: 640px; margin: auto; }
svg.swatch { width: 34px; height: 12px; flex: none; }
svg text { font: 12px system-ui, -apple-system, "Segoe UI", Roboto, "DejaVu Sans", sans-serif; fill: var(--ink);
  paint-order: stroke; stroke: var(--card); stroke-width: 4px; stroke-linejoin: round; }
svg text.tick { font-size: 11px; fill: var(--soft); }
@media (max-width: 600px) { svg text { font-size: 16px; } svg text.tick { font-size: 15px; } }
svg text.good { fill: var(--good); } svg text.unclear { fill: var(--unclear); } svg text.bad { fill: var(--bad); }
.axis { stroke: var(--soft); stroke-width: 1; } .grid { stroke: var(--rule); stroke-width: 1; }
.mark { stroke: var(--mark); stroke-width: 1.5; stroke-dasharray: 5 4; } .band { fill: var(--mark); opacity: .16; }
.mark.simulated { stroke: var(--ink); stroke-dasharray: 1.5 3; }
.band.simulated { fill: none; stroke: var(--ink); stroke-dasharray: 1.5 3; opacity: .7; }
.curve { fill: none; stroke-width: 2; stroke-linejoin: round; } .fill { opacity: .2; stroke: none; }
.shape { stroke-width: 1.5; } .shape.hollow { fill: var(--card); }
.whisker { stroke-width: 2; } .dot { stroke-width: 2.5; } .dot.unclear { fill: var(--card); } .dot.bad { fill: none; }
.whisker.good, .dot.good { stroke: var(--good); } .dot.good, .arrow.good { fill: var(--good); }
.whisker.unclear, .dot.unclear { stroke: var(--unclear); } .arrow.unclear { fill: var(--unclear); }
.whisker.bad, .dot.bad { stroke: var(--bad); } .arrow.bad { fill: var(--bad); } .whisker.bad { stroke-dasharray: 3 3; }
.bar { stroke-width: 1.5; } .bar.b0 { fill: var(--c0); stroke: var(--c0); }
.bar.b1 { fill: var(--card); stroke: var(--c1); } .bar.b2 { fill: var(--c2); stroke: var(--c2); fill-opacity: .35;
  stroke-dasharray: 3 2; }
"""

_COLUMNS = 7  # of a table that can be stacked

_NARROW = """
  dl.facts .long { grid-column: 1 / -1; } td.long, th.long { min-width: 6em; }
  table.stacked, .stacked tbody, .stacked tr, .stacked tbody th, .stacked caption { display: block; }
  .stacked thead { position: absolute; width: 1px; height: 1px; overflow: hidden; clip-path: inset(50%); }
  .stacked tr { padding: 6px 0; border-bottom: 1px solid var(--rule); }
  .stacked tbody th { font-weight: 600; } .stacked th, .stacked td { border: 0; padding: 1px 0; }
  .stacked td { display: inline-block; margin-right: 18px; text-align: left; min-width: 0; max-width: 100%; }
  .stacked td.words { display: block; } .stacked td.none { display: none; }
  .stacked td.long { font-size: .8em; }
  .stacked td::before { color: var(--soft); }
"""

_PRINT = """
  body { max-width: none; padding: 0; font-size: 11pt; } nav { display: none; } .scroll { overflow: visible; }
  .cards { grid-template-columns: 1fr 1fr; } table { font-size: .75rem; }
  th, td { padding-right: 8px; } td.words, td.long, th.long { min-width: 0; }
  h2, h3 { break-after: avoid; } .card, .verdict, tr, svg.chart { break-inside: avoid; }
"""


def _series() -> str:
    return "".join(
        f".curve.s{place} {{ stroke: var(--c{place}); stroke-dasharray: {dash}; }}\n"
        f".shape.s{place} {{ stroke: var(--c{place}); }} .shape.solid.s{place} {{ fill: var(--c{place}); }}\n"
        f".fill.f{place} {{ fill: var(--c{place}); }}\n"
        for place, dash in enumerate(_DASHES)
    )


def _labels() -> str:
    return "".join(
        f".stacked td:nth-child({place + 1})::before {{ content: var(--h{place}); }}\n" for place in range(1, _COLUMNS)
    )


STYLE = (
    f":root {{ color-scheme: light dark; {_LIGHT} }}\n"
    f"@media (prefers-color-scheme: dark) {{ :root {{ {_DARK} }} }}\n"
    f"{_PAGE}{_series()}@media screen and (max-width: 900px) {{ {_NARROW}{_labels()} }}\n"
    f"@media print {{ :root {{ {_LIGHT} {_PAPER} }} {_PRINT} }}\n"
)
