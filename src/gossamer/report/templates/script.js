// Shows values under the pointer and for the keyboard. The page is complete without it.
(function () {
  'use strict';
  const tip = document.getElementById('tip');

  function show(text, x, y) {
    tip.textContent = text;
    tip.style.display = 'block';
    const width = tip.offsetWidth, height = tip.offsetHeight, page = document.documentElement.clientWidth;
    tip.style.left = Math.max(6, Math.min(x - width / 2, page - width - 6)) + window.scrollX + 'px';
    tip.style.top = (y - height - 14 < 0 ? y + 18 : y - height - 14) + window.scrollY + 'px';
  }

  function hide() {
    tip.style.display = 'none';
  }

  function format(value, unit) {
    return value === null ? '–' : String(+value.toPrecision(4)).replace('-', '−') + unit;
  }

  document.querySelectorAll('[data-tip]').forEach(function (element) {
    element.addEventListener('pointermove', function (event) {
      show(element.dataset.tip, event.clientX, event.clientY);
    });
    element.addEventListener('pointerleave', hide);
    element.addEventListener('focus', function () {
      if (!element.matches(':focus-visible')) return;
      const box = element.getBoundingClientRect();
      show(element.dataset.tip, box.left + Math.min(box.width / 2, 160), box.top);
    });
    element.addEventListener('blur', hide);
  });

  document.querySelectorAll('[data-chart]').forEach(function (chart) {
    const data = JSON.parse(chart.dataset.chart);
    const area = chart.querySelector('.area'), cursor = chart.querySelector('.cursor');
    const epochs = data.lines.flatMap(function (line) { return line.at.map(function (point) { return point[0]; }); })
      .sort(function (a, b) { return a - b; })
      .filter(function (x, i, all) { return !i || x !== all[i - 1]; });
    let current = -1;
    if (!epochs.length) return;

    function pointAt(line, x) {
      let best = null;
      line.at.forEach(function (point) {
        if (line.step) {
          if (point[0] <= x) best = point;
        } else if (best === null || Math.abs(point[0] - x) < Math.abs(best[0] - x)) best = point;
      });
      return best;
    }

    function showEpoch(x, y) {
      const box = area.getBoundingClientRect(), share = (x - data.from) / (data.to - data.from);
      cursor.style.left = 100 * share + '%';
      cursor.style.display = 'block';
      const lines = ['epoch ' + format(x, '')];
      data.lines.forEach(function (line) {
        const point = pointAt(line, x);
        if (point) lines.push(line.name + ': ' + format(point[1], data.unit));
      });
      show(lines.join('\n'), box.left + share * box.width, y === null ? box.top + 20 : y);
    }

    function nearest(x) {
      let best = 0;
      epochs.forEach(function (epoch, i) {
        if (Math.abs(epoch - x) < Math.abs(epochs[best] - x)) best = i;
      });
      return best;
    }

    function leave() {
      cursor.style.display = 'none';
      hide();
    }

    area.addEventListener('pointermove', function (event) {
      const box = area.getBoundingClientRect();
      current = nearest(data.from + (event.clientX - box.left) / box.width * (data.to - data.from));
      showEpoch(epochs[current], event.clientY);
    });
    area.addEventListener('pointerleave', leave);
    chart.addEventListener('focus', function () {
      if (!chart.matches(':focus-visible')) return;
      if (current < 0) current = epochs.length - 1;
      showEpoch(epochs[current], null);
    });
    chart.addEventListener('blur', leave);
    chart.addEventListener('keydown', function (event) {
      if (event.key === 'Escape') leave();
      const moves = {ArrowLeft: current - 1, ArrowRight: current + 1, Home: 0, End: epochs.length - 1};
      const next = moves[event.key];
      if (next === undefined) return;
      event.preventDefault();
      current = Math.max(0, Math.min(epochs.length - 1, next));
      showEpoch(epochs[current], null);
    });
  });

  document.querySelectorAll('.scroll').forEach(function (box) {
    const hint = box.previousElementSibling;
    function update() {
      hint.classList.toggle('on', box.scrollWidth - box.clientWidth - box.scrollLeft > 2);
    }
    box.addEventListener('scroll', update, {passive: true});
    new ResizeObserver(update).observe(box);
  });

  let opened = [];
  window.addEventListener('beforeprint', function () {
    document.querySelectorAll('details:not([open]):not(.settings)').forEach(function (details) {
      details.open = true;
      opened.push(details);
    });
  });
  window.addEventListener('afterprint', function () {
    opened.forEach(function (details) { details.open = false; });
    opened = [];
  });
})();
