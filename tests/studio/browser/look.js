// What is wrong with how the page looks now, as lines: called with its width by the tests of the look.
(width) => {
  const wrong = [];
  const shown = (element) => element.checkVisibility({checkOpacity: true, checkVisibilityCSS: true}) && element.getClientRects().length > 0;
  const name = (element) => {
    const id = element.closest('[id]');
    const text = (element.textContent || element.value || '').trim().replace(/\s+/g, ' ').slice(0, 50);
    return `${element.tagName.toLowerCase()}.${element.className?.baseVal ?? element.className} in #${id ? id.id : ''} "${text}"`;
  };

  // -- nothing beyond the right edge, but for what scrolls by itself
  if (document.documentElement.scrollWidth > width) wrong.push(`the page is ${document.documentElement.scrollWidth} wide`);
  const clipped = (element) => {
    for (let each = element.parentElement; each; each = each.parentElement) {
      if (each.getBoundingClientRect().right <= width + 1 && getComputedStyle(each).overflowX !== 'visible') return true;
    }
    return false;
  };
  for (const element of document.querySelectorAll('.gradio-container *')) {
    const box = element.getBoundingClientRect();
    if (box.width > 1 && shown(element) && (box.right > width + 1 || box.left < -1) && !clipped(element)) {
      wrong.push(`${name(element)} reaches from ${Math.round(box.left)} to ${Math.round(box.right)}`);
    }
  }

  // -- contrast of texts, as WCAG 2 counts it
  const canvas = document.createElement('canvas').getContext('2d', {willReadFrequently: true});
  const rgba = (text) => {
    canvas.clearRect(0, 0, 1, 1);
    canvas.fillStyle = text;
    canvas.fillRect(0, 0, 1, 1);
    const [r, g, b, a] = canvas.getImageData(0, 0, 1, 1).data;
    return [r, g, b, a / 255];
  };
  const over = (top, below) => [0, 1, 2].map((k) => top[3] * top[k] + (1 - top[3]) * below[k]);
  const ground = (element) => {
    const layers = [];
    for (let each = element; each; each = each.parentElement) {
      const layer = rgba(getComputedStyle(each).backgroundColor);
      if (layer[3] > 0) layers.push(layer);
      if (layer[3] === 1) break;
    }
    return layers.reverse().reduce((below, layer) => over(layer, below), [255, 255, 255]);
  };
  const light = (colour) => {
    const [r, g, b] = colour.map((each) => (each /= 255) <= 0.04045 ? each / 12.92 : ((each + 0.055) / 1.055) ** 2.4);
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const said = new Set();
  const judge = (element, colour) => {
    if (element.closest(':disabled, [aria-hidden=true], [aria-disabled=true]')) return;
    const style = getComputedStyle(element), below = ground(element);
    const [high, low] = [light(over(rgba(colour), below)), light(below)].sort((a, b) => b - a);
    const ratio = (high + 0.05) / (low + 0.05), size = parseFloat(style.fontSize);
    const wanted = size >= 24 || (size >= 18.66 && Number(style.fontWeight) >= 700) ? 3 : 4.5;
    const line = `${name(element)}: contrast ${ratio.toFixed(2)}, expected ${wanted}`;
    if (ratio < wanted && !said.has(line)) {
      said.add(line);
      wrong.push(line);
    }
  };
  const texts = document.createTreeWalker(document.querySelector('.gradio-container'), NodeFilter.SHOW_TEXT);
  while (texts.nextNode()) {
    const element = texts.currentNode.parentElement;
    if (texts.currentNode.data.trim() && shown(element) && !element.closest('script, style, svg')) judge(element, getComputedStyle(element).color);
  }
  for (const element of document.querySelectorAll('textarea, input:not([type=radio], [type=checkbox], [type=range], [type=file])')) {
    if (shown(element) && element.value) judge(element, getComputedStyle(element).color);
    if (shown(element) && element.placeholder && !element.value) judge(element, getComputedStyle(element, '::placeholder').color);
  }

  // -- every control has a name
  for (const element of document.querySelectorAll('button, input, textarea, select, [role=slider], [role=tab]')) {
    const named = element.ariaLabel || element.getAttribute('aria-labelledby') || element.title || element.textContent.trim() || element.labels?.[0]?.textContent.trim();
    if (shown(element) && !named) wrong.push(`${name(element)} has no name`);
  }
  return wrong;
}
