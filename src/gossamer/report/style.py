"""How the page looks, and the little script that shows values under the pointer.

No library is inlined: a plotting library would add about 4 MB to each page. Everything can be read without the
script; colours follow the system, and the palette is one that colour-blind readers tell apart (Okabe & Ito 2008,
darkened for white paper).
"""

from __future__ import annotations

COLOURS = 6
"""How many runs have a colour of their own; then they repeat."""

STYLE = """
:root{color-scheme:light dark;--ground:#fbfbfa;--sheet:#fff;--ink:#1c2024;--soft:#5b636b;--line:#dfe3e6;--grid:#e9ecee;
--accent:#0067a3;--wash:0,103,163;--before:#8b949c;--shade:rgba(28,32,36,.28);
--c0:#0067a3;--c1:#c24e00;--c2:#00785a;--c3:#9a3f84;--c4:#7a5c00;--c5:#4d555c}
@media(prefers-color-scheme:dark){:root{--ground:#14171a;--sheet:#1b1f23;--ink:#e6e9ec;--soft:#a3acb5;--line:#31373d;
--grid:#272c31;--accent:#6bbcf0;--wash:107,188,240;--before:#7d868f;--shade:rgba(230,233,236,.34);
--c0:#6bbcf0;--c1:#f0a04b;--c2:#45cfa5;--c3:#e093c6;--c4:#e3d25a;--c5:#c3cad1}}
*{box-sizing:border-box}
html{-webkit-text-size-adjust:100%;scroll-behavior:smooth;scroll-padding-top:3.5rem}
@media(prefers-reduced-motion:reduce){html{scroll-behavior:auto}}
body{margin:0;background:var(--ground);color:var(--ink);font:16px/1.55 system-ui,-apple-system,"Segoe UI",Roboto,
"Helvetica Neue",Arial,sans-serif;font-variant-numeric:tabular-nums;overflow-wrap:anywhere}
main,header,footer{max-width:68rem;margin:0 auto;padding:0 1.25rem}
header{padding-top:2.5rem}
h1{font-size:1.9rem;line-height:1.2;margin:0;font-weight:650;letter-spacing:-.015em}
h2{font-size:1.25rem;margin:0 0 .35rem;font-weight:620;letter-spacing:-.01em}
h3{font-size:1rem;margin:1.6rem 0 .35rem;font-weight:600}
p{margin:.3rem 0 1rem;max-width:46rem}
.lead,.soft{color:var(--soft)}
.lead{margin:.4rem 0 0}
a{color:var(--accent)}
nav{position:sticky;top:0;z-index:5;background:var(--ground);border-bottom:1px solid var(--line);margin-top:1.4rem}
nav ul{max-width:68rem;margin:0 auto;padding:.55rem 1.25rem;display:flex;gap:1.15rem;list-style:none;overflow-x:auto;
scrollbar-width:none}
nav a{text-decoration:none;color:var(--soft);font-size:.9rem;white-space:nowrap}
nav a:hover{color:var(--ink)}
:focus-visible{outline:2px solid var(--accent);outline-offset:2px;border-radius:4px}
section{margin:2.6rem 0}
.note,.empty{border:1px solid var(--line);border-radius:10px;background:var(--sheet);padding:.8rem 1rem;max-width:none}
.note{border-left:4px solid var(--c1)}
.empty{color:var(--soft)}
code,pre{font-family:ui-monospace,SFMono-Regular,Menlo,Consolas,monospace;font-size:.86em}
.cards{display:grid;grid-template-columns:repeat(auto-fit,minmax(9.6rem,1fr));gap:.8rem;margin:1.2rem 0 0;padding:0}
.card{background:var(--sheet);border:1px solid var(--line);border-radius:12px;padding:.85rem 1rem}
.card dt{color:var(--soft);font-size:.83rem}
.card dd{margin:0}
.card .value{font-size:1.6rem;line-height:1.25;font-weight:620;letter-spacing:-.02em}
.card .more{color:var(--soft);font-size:.83rem;line-height:1.4}
.sheet{background:var(--sheet);border:1px solid var(--line);border-radius:12px;padding:1rem 1.1rem;margin:.9rem 0}
.pair{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,24rem),1fr));gap:.9rem}
.pair>.sheet{margin:0;min-width:0}
.chart{margin:0;position:relative}
.chart figcaption,.small figcaption{font-size:.9rem;font-weight:600;margin-bottom:.7rem;display:flex;flex-wrap:wrap;
gap:.1rem 1rem;align-items:baseline}
.legend{font-weight:400;color:var(--soft);font-size:.83rem;display:inline-flex;flex-wrap:wrap;gap:.1rem .9rem}
.key{white-space:normal}
.key::before{content:"";display:inline-block;width:1.1em;border-top:2.5px solid var(--k);vertical-align:.28em;
margin-right:.4em}
.key.plan::before{border-top-style:dashed}
.plot{display:grid;grid-template-columns:auto minmax(0,1fr);grid-template-rows:var(--high,13rem) 1.5rem;
column-gap:.55rem}
.ys{position:relative;min-width:2.6rem}
.ys span{position:absolute;right:0;transform:translateY(-50%);font-size:.75rem;color:var(--soft);white-space:nowrap}
.ys::after{content:attr(data-wide);visibility:hidden;font-size:.75rem;white-space:nowrap}
.xs{position:relative;grid-column:2}
.xs span{position:absolute;top:.25rem;transform:translateX(-50%);font-size:.75rem;color:var(--soft);white-space:nowrap}
.xs span:first-child{transform:none}
.xs span:last-child{transform:translateX(-100%)}
.area{position:relative;cursor:crosshair;touch-action:pan-y}
.area svg,.small svg{position:absolute;inset:0;width:100%;height:100%;overflow:visible}
svg path{fill:none;vector-effect:non-scaling-stroke;stroke-linejoin:round;stroke-linecap:round}
svg .g{stroke:var(--grid);stroke-width:1;stroke-linecap:butt}
svg .l{stroke:var(--k);stroke-width:2}
svg .d{stroke:var(--k);stroke-width:7}
svg .p{stroke:var(--k);stroke-width:1.6;stroke-dasharray:5 5;stroke-linecap:butt}
.cursor{position:absolute;top:0;bottom:0;border-left:1px solid var(--soft);pointer-events:none;display:none}
#tip{position:absolute;z-index:9;pointer-events:none;background:var(--ink);color:var(--ground);font-size:.8rem;
line-height:1.4;padding:.4rem .6rem;border-radius:7px;max-width:min(20rem,90vw);white-space:pre-line;display:none}
.scroll{overflow-x:auto;max-width:100%;position:relative;background:
linear-gradient(to right,var(--sheet) 35%,transparent) left/2.4rem 100% no-repeat local,
linear-gradient(to left,var(--sheet) 35%,transparent) right/2.4rem 100% no-repeat local,
linear-gradient(to right,var(--shade),transparent) left/.9rem 100% no-repeat scroll,
linear-gradient(to left,var(--shade),transparent) right/.9rem 100% no-repeat scroll}
.scroll th,.scroll td{overflow-wrap:break-word}
.hint{display:none;color:var(--soft);font-size:.78rem;text-align:right;margin-bottom:.2rem}
.hint.on{display:block}
table{border-collapse:collapse;width:100%;font-size:.87rem}
caption{text-align:left;color:var(--soft);font-size:.83rem;padding-bottom:.5rem}
th,td{padding:.3rem .6rem;text-align:left;border-bottom:1px solid var(--grid);vertical-align:middle}
th{font-weight:600}
thead th{color:var(--soft);font-size:.8rem;border-bottom-color:var(--line);vertical-align:bottom}
tbody th{font-weight:450}
td.n,th.n{text-align:right;white-space:nowrap}
tr[data-tip]:hover>*,tr[data-tip]:focus>*{background:rgba(var(--wash),.08)}
.layers tbody th{min-width:9rem}
.layers .wide{white-space:nowrap}
.bar{position:relative;height:.72rem;min-width:4.5rem;background:var(--grid);border-radius:3px;
print-color-adjust:exact;-webkit-print-color-adjust:exact}
.bar i{position:absolute;inset:0 auto 0 0;background:var(--k);border-radius:3px}
.bar b{position:absolute;top:-.18rem;bottom:-.18rem;width:2px;background:var(--ink);margin-left:-1px}
.size i{background:var(--before)}
.bar u{position:absolute;top:12%;bottom:12%;min-width:3px;border:0 solid var(--ink);border-width:0 1.5px;
background:linear-gradient(var(--ink),var(--ink)) center/100% 1.5px no-repeat}
td small{display:block;color:var(--soft);font-size:.78rem;line-height:1.2}
.title{font-size:.87rem;margin-bottom:.4rem}
.fill{width:32%}
.speeds .bar{min-width:5rem;height:1rem}
.speeds .bar i{opacity:.62}
.speeds tbody th{min-width:7rem}
.runs th[scope=row]{min-width:8rem}
.runs td:nth-child(2){min-width:6rem}
.heat tbody th{min-width:8.5rem}
.heat td{text-align:center;white-space:nowrap;border:2px solid var(--sheet);border-radius:5px;min-width:3.4rem;
print-color-adjust:exact;-webkit-print-color-adjust:exact}
.grid{display:grid;grid-template-columns:repeat(auto-fill,minmax(min(100%,15rem),1fr));gap:.9rem}
.grid>.sheet{margin:0;min-width:0}
.masks{grid-template-columns:repeat(auto-fill,minmax(min(100%,19rem),1fr))}
.small{margin:0;min-width:0}
.small figcaption{display:block;margin:0 0 .45rem;line-height:1.35;font-size:.85rem}
.small figcaption span{font-weight:400;color:var(--soft);display:block;font-size:.79rem}
.small .box{position:relative;height:6rem;border-bottom:1px solid var(--line)}
svg .b{stroke:var(--before);stroke-width:1;fill:var(--before);fill-opacity:.28}
svg .a{stroke:var(--accent);stroke-width:1.8}
.ends{display:flex;justify-content:space-between;font-size:.73rem;color:var(--soft)}
.mask{display:block;width:100%;height:auto;image-rendering:pixelated;border:1px solid var(--line);border-radius:3px;
background:var(--ground);print-color-adjust:exact;-webkit-print-color-adjust:exact}
.small svg.excerpt{position:static;width:100%;height:auto;overflow:hidden}
.excerpt path{vector-effect:none;stroke-linecap:butt}
.excerpt .f{stroke:var(--grid);stroke-width:.98}
.excerpt .k{stroke:#2583c4;stroke-width:.84}
.mask+.soft{font-size:.76rem;margin:.25rem 0 .7rem}
details{margin:.9rem 0}
summary{cursor:pointer;color:var(--accent);font-size:.92rem}
summary:hover{text-decoration:underline}
pre{background:var(--ground);border:1px solid var(--line);border-radius:8px;padding:.9rem;overflow:auto;
max-height:34rem;overflow-wrap:normal;line-height:1.45;tab-size:2}
.dot{display:inline-block;width:.7em;height:.7em;border-radius:50%;background:var(--k);margin-right:.5em}
article{border-top:1px solid var(--line);margin-top:2.6rem;padding-top:1.6rem}
article h2{font-size:1.4rem}
article section{margin:1.6rem 0}
footer{color:var(--soft);font-size:.83rem;padding-top:1.2rem;padding-bottom:2.5rem}
@media(max-width:34rem){h1{font-size:1.5rem}main,header,footer{padding-left:.9rem;padding-right:.9rem}
nav ul{padding-left:.9rem;padding-right:.9rem}.sheet{padding:.85rem .8rem}.plot{--high:10.5rem}
.cards{grid-template-columns:repeat(2,minmax(0,1fr));gap:.6rem}.card{padding:.7rem .75rem}.card .value{font-size:1.3rem}
.scroll tbody th{position:sticky;left:0;z-index:1;background:var(--sheet);
box-shadow:inset 0 -1px var(--grid);max-width:8.5rem}
.wide{display:none}th,td{padding:.3rem .4rem}.layers tbody th{min-width:7rem}.bar{min-width:3.2rem}}
@media print{:root{color-scheme:light;--ground:#fff;--sheet:#fff;--ink:#000;--soft:#444;--line:#ccc;--grid:#e4e4e4;
--accent:#0067a3;--wash:0,103,163;--before:#8b949c;--c0:#0067a3;--c1:#c24e00;--c2:#00785a;--c3:#9a3f84;--c4:#7a5c00;
--c5:#4d555c}
@page{margin:16mm}
body{font-size:10.5pt}nav,#tip,.cursor,.settings{display:none!important}main,header,footer{max-width:none;padding:0}
section{margin:1.4rem 0}h2,h3{break-after:avoid}.card,.chart,.small,tr,.empty,.note{break-inside:avoid}
thead{display:table-header-group}.scroll{overflow:visible;background:none}.hint{display:none!important}.plot{--high:9.5rem}article{break-before:page}
.cards{grid-template-columns:repeat(4,1fr)}details:not([open]){display:none}}
"""

SCRIPT = """
(function(){
'use strict';
var tip=document.getElementById('tip');
function show(text,x,y){
 tip.textContent=text;tip.style.display='block';
 var w=tip.offsetWidth,h=tip.offsetHeight,v=document.documentElement.clientWidth;
 tip.style.left=Math.max(6,Math.min(x-w/2,v-w-6))+window.scrollX+'px';
 tip.style.top=(y-h-14<0?y+18:y-h-14)+window.scrollY+'px';
}
function hide(){tip.style.display='none';}
function figures(v,unit){return v===null?'–':String(+v.toPrecision(4)).replace('-','−')+unit;}
document.querySelectorAll('[data-tip]').forEach(function(e){
 e.addEventListener('pointermove',function(m){show(e.dataset.tip,m.clientX,m.clientY);});
 e.addEventListener('pointerleave',hide);
 e.addEventListener('focus',function(){
  if(!e.matches(':focus-visible'))return;
  var r=e.getBoundingClientRect();show(e.dataset.tip,r.left+Math.min(r.width/2,160),r.top);
 });
 e.addEventListener('blur',hide);
});
document.querySelectorAll('[data-chart]').forEach(function(chart){
 var c=JSON.parse(chart.dataset.chart),area=chart.querySelector('.area'),line=chart.querySelector('.cursor');
 var stops=[];
 c.lines.forEach(function(s){s.at.forEach(function(p){stops.push(p[0]);});});
 stops=stops.sort(function(a,b){return a-b;}).filter(function(x,i){return !i||x!==stops[i-1];});
 var here=-1;
 function value(s,x){
  var best=null;
  s.at.forEach(function(p){
   if(s.step){if(p[0]<=x)best=p;}
   else if(best===null||Math.abs(p[0]-x)<Math.abs(best[0]-x))best=p;
  });
  return best;
 }
 function point(x,y){
  var r=area.getBoundingClientRect(),share=(x-c.from)/(c.to-c.from);
  line.style.left=100*share+'%';line.style.display='block';
  var words=['epoch '+figures(x,'')];
  c.lines.forEach(function(s){var p=value(s,x);if(p)words.push(s.name+': '+figures(p[1],c.unit));});
  show(words.join('\\n'),r.left+share*r.width,y===null?r.top+20:y);
 }
 function nearest(x){
  var best=0;
  stops.forEach(function(s,i){if(Math.abs(s-x)<Math.abs(stops[best]-x))best=i;});
  return best;
 }
 function leave(){line.style.display='none';hide();}
 if(!stops.length)return;
 area.addEventListener('pointermove',function(m){
  var r=area.getBoundingClientRect();
  here=nearest(c.from+(m.clientX-r.left)/r.width*(c.to-c.from));point(stops[here],m.clientY);
 });
 area.addEventListener('pointerleave',leave);
 chart.addEventListener('focus',function(){
  if(chart.matches(':focus-visible')){if(here<0)here=stops.length-1;point(stops[here],null);}
 });
 chart.addEventListener('blur',leave);
 chart.addEventListener('keydown',function(k){
  var to={ArrowLeft:here-1,ArrowRight:here+1,Home:0,End:stops.length-1}[k.key];
  if(k.key==='Escape')leave();
  if(to===undefined)return;
  k.preventDefault();here=Math.max(0,Math.min(stops.length-1,to));point(stops[here],null);
 });
});
document.querySelectorAll('.scroll').forEach(function(box){
 var hint=box.previousElementSibling;
 function look(){hint.classList.toggle('on',box.scrollWidth-box.clientWidth-box.scrollLeft>2);}
 box.addEventListener('scroll',look,{passive:true});
 new ResizeObserver(look).observe(box);
});
var opened=[];
window.addEventListener('beforeprint',function(){
 document.querySelectorAll('details:not([open]):not(.settings)').forEach(function(d){d.open=true;opened.push(d);});
});
window.addEventListener('afterprint',function(){opened.forEach(function(d){d.open=false;});opened=[];});
})();
"""
