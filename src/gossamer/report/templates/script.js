// Shows values under the pointer. The page is complete without it.
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
    const epochs = data.lines.flatMap(function (line) { return line.at.map(function (point) { return point[0]; }); });
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
      show(lines.join('\n'), box.left + share * box.width, y);
    }

    function nearest(x) {
      return epochs.reduce(function (best, epoch) { return Math.abs(epoch - x) < Math.abs(best - x) ? epoch : best; });
    }

    area.addEventListener('pointermove', function (event) {
      const box = area.getBoundingClientRect();
      const x = data.from + (event.clientX - box.left) / box.width * (data.to - data.from);
      showEpoch(nearest(x), event.clientY);
    });
    area.addEventListener('pointerleave', function () {
      cursor.style.display = 'none';
      hide();
    });
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
