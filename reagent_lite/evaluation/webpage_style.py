"""The report page's style sheet: one column on a phone, light and dark, ink on paper in print.

Series colours are those of Okabe and Ito (https://jfly.uni-koeln.de/color/), which colour-blind readers tell apart;
dark and light take the darker or the lighter ones, so that each stands out from the ground.
"""

_LIGHT = """--ground: #ffffff; --card: #f6f7f9; --ink: #1b1f24; --soft: #57606a; --rule: #d4d9df;
  --c0: #0072b2; --c1: #d55e00; --c2: #00795a; --c3: #a34a80; --c4: #2b8cc4; --c5: #875c00; --c6: #1b1f24;
  --c7: #6b7280; --good: #00795a; --unclear: #875c00; --bad: #b34700; --mark: #0072b2;"""
_DARK = """--ground: #14171b; --card: #1d2127; --ink: #e8eaed; --soft: #a4abb5; --rule: #3a414b;
  --c0: #56b4e9; --c1: #e69f00; --c2: #2fd0a3; --c3: #e39bc3; --c4: #7fa8ff; --c5: #f0e442; --c6: #e8eaed;
  --c7: #9aa3ad; --good: #2fd0a3; --unclear: #e69f00; --bad: #ff8a4c; --mark: #56b4e9;"""
_PAPER = "color-scheme: light; --ground: #fff; --card: #fff; --ink: #000; --soft: #333; --rule: #999;"
_DASHES = ("none", "7 4", "2 3", "9 3 2 3") * 2

_PAGE = """
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 1120px; padding: 16px; background: var(--ground); color: var(--ink);
  font: 16px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "DejaVu Sans", sans-serif; overflow-wrap: anywhere; }
h1 { font-size: 1.6rem; line-height: 1.25; margin: 8px 0 16px; }
h2 { font-size: 1.25rem; margin: 40px 0 12px; padding-top: 12px; border-top: 1px solid var(--rule); }
h3 { font-size: 1rem; margin: 4px 0 8px; }
p { margin: 6px 0; max-width: 75ch; }
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
dl.facts div { min-width: 0; } dl.facts dt { color: var(--soft); font-size: .85rem; } dl.facts dd { margin: 0; }
.scroll { overflow-x: auto; max-width: 100%; }
table { border-collapse: collapse; font-size: .9rem; font-variant-numeric: tabular-nums; margin: 8px 0; width: 100%; }
caption { text-align: left; font-weight: 600; padding: 4px 0; }
th, td { text-align: left; vertical-align: top; padding: 5px 14px 5px 0; border-bottom: 1px solid var(--rule);
  overflow-wrap: normal; }
td.figure, th.figure { text-align: right; white-space: nowrap; }
td.words { min-width: 13em; } td.short { white-space: nowrap; }
tbody th { min-width: 9em; font-weight: 500; }
code, pre { font: .85em/1.45 ui-monospace, "DejaVu Sans Mono", monospace; }
pre { overflow-x: auto; background: var(--card); padding: 12px; border-radius: 8px; }
summary { cursor: pointer; padding: 4px 0; color: var(--c0); }
ul.legend { list-style: none; margin: 6px 0; padding: 0; display: flex; flex-wrap: wrap; gap: 2px 16px;
  font-size: .85rem; }
ul.legend li { display: flex; align-items: center; gap: 6px; }
svg.chart { display: block; width: 100%; height: auto; max-width: 640px; margin: auto; }
svg.swatch { width: 34px; height: 12px; flex: none; }
svg text { font: 12px system-ui, -apple-system, "Segoe UI", Roboto, "DejaVu Sans", sans-serif; fill: var(--ink);
  paint-order: stroke; stroke: var(--card); stroke-width: 4px; stroke-linejoin: round; }
svg text.tick { font-size: 11px; fill: var(--soft); }
@media (max-width: 600px) { svg text { font-size: 15px; } svg text.tick { font-size: 14px; } }
svg text.good { fill: var(--good); } svg text.unclear { fill: var(--unclear); } svg text.bad { fill: var(--bad); }
.axis { stroke: var(--soft); stroke-width: 1; } .grid { stroke: var(--rule); stroke-width: 1; }
.mark { stroke: var(--mark); stroke-width: 1.5; stroke-dasharray: 5 4; } .band { fill: var(--mark); opacity: .16; }
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

_PRINT = """
  body { max-width: none; padding: 0; font-size: 11pt; } nav { display: none; } .scroll { overflow: visible; }
  .cards { grid-template-columns: 1fr 1fr; } table { font-size: .75rem; }
  th, td, td.figure, th.figure, td.short { white-space: normal; overflow-wrap: anywhere; padding-right: 8px; }
  td.words, tbody th { min-width: 0; }
  pre { white-space: pre-wrap; } h2, h3 { break-after: avoid; } .card, .verdict, tr { break-inside: avoid; }
"""


def _series() -> str:
    return "".join(
        f".curve.s{place} {{ stroke: var(--c{place}); stroke-dasharray: {dash}; }}\n"
        f".shape.s{place} {{ stroke: var(--c{place}); }} .shape.solid.s{place} {{ fill: var(--c{place}); }}\n"
        f".fill.f{place} {{ fill: var(--c{place}); }}\n"
        for place, dash in enumerate(_DASHES)
    )


STYLE = (
    f":root {{ color-scheme: light dark; {_LIGHT} }}\n"
    f"@media (prefers-color-scheme: dark) {{ :root {{ {_DARK} }} }}\n"
    f"{_PAGE}{_series()}@media print {{ :root {{ {_LIGHT} {_PAPER} }} {_PRINT} }}\n"
)
