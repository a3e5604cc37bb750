// The pictures of a case, decoded into numbers: grey values, the raters' classes, probabilities.
const LAYOUT = DATA.layout;
const coloursOf = (text) => Uint8Array.from(atob(text), (character) => character.charCodeAt(0));
const COLOURS = coloursOf(DATA.probability_colours);
const ENTROPY_COLOURS = coloursOf(DATA.entropy_colours);
// entropy of classes that are equally probable
const MAX_BITS = LAYOUT ? Math.log2(LAYOUT.classes.length + 1) : 1;
// from this probability on, the overlay is opaque; lower ones are transparent
const OPAQUE = 0.08;
const TOO_HIGH = [213, 94, 0];
const TOO_LOW = [86, 180, 233];

async function pixelsOf(uri) {
  const image = new Image();
  image.src = uri;
  await image.decode();
  const canvas = el("canvas", { width: image.width, height: image.height });
  const context = canvas.getContext("2d", { willReadFrequently: true });
  context.drawImage(image, 0, 0);
  const { data, width } = context.getImageData(0, 0, image.width, image.height);
  return { data, width };
}

function tileOf(sheet, width, height, column, row) {
  const tile = new Uint8Array(width * height);
  for (let y = 0; y < height; y += 1) {
    let from = ((row * height + y) * sheet.width + column * width) * 4;
    for (let x = 0; x < width; x += 1, from += 4) tile[y * width + x] = sheet.data[from];
  }
  return tile;
}

class CasePictures {
  constructor(picture, image, maps) {
    [this.height, this.width] = picture.size;
    this.picture = picture;
    this.labels = new Map();
    this.greys = LAYOUT.channels.map((_, channel) => tileOf(image, this.width, this.height, 0, channel));
    const count = LAYOUT.rater_tiles + LAYOUT.classes.length * (LAYOUT.methods.length + LAYOUT.has_truth);
    this.tiles = Array.from({ length: count }, (_, tile) =>
      tileOf(maps, this.width, this.height, tile % LAYOUT.columns, Math.floor(tile / LAYOUT.columns)),
    );
  }

  static async load(picture) {
    return new CasePictures(picture, ...(await Promise.all([pixelsOf(picture.image), pixelsOf(picture.maps)])));
  }

  // 1 where the rater drew the class; class 0 is the first one after the background
  rater(number, classNumber) {
    const tile = this.tiles[Math.floor(number / LAYOUT.raters_per_tile)];
    const shift = (number % LAYOUT.raters_per_tile) * LAYOUT.bits;
    const mask = (1 << LAYOUT.bits) - 1;
    const drawn = new Uint8Array(tile.length);
    for (let at = 0; at < tile.length; at += 1) drawn[at] = ((tile[at] >> shift) & mask) === classNumber + 1 ? 1 : 0;
    return drawn;
  }

  // mean over the raters of the case; computed once, because every difference needs it
  label(classNumber) {
    if (!this.labels.has(classNumber)) {
      const raters = LAYOUT.raters.map((_, number) => number).filter((number) => this.picture.present[number]);
      const mean = new Float32Array(this.width * this.height);
      for (const number of raters) {
        const drawn = this.rater(number, classNumber);
        for (let at = 0; at < mean.length; at += 1) mean[at] += drawn[at] / raters.length;
      }
      this.labels.set(classNumber, mean);
    }
    return this.labels.get(classNumber);
  }

  probability(tile) {
    const values = new Float32Array(tile.length);
    for (let at = 0; at < tile.length; at += 1) values[at] = tile[at] / 255;
    return values;
  }

  truth(classNumber) {
    return this.probability(this.tiles[LAYOUT.rater_tiles + classNumber]);
  }

  // place: number of the method among those with pictures
  prediction(place, classNumber) {
    const first = LAYOUT.rater_tiles + LAYOUT.classes.length * (place + LAYOUT.has_truth);
    return this.probability(this.tiles[first + classNumber]);
  }

  difference(place, classNumber) {
    const label = this.label(classNumber);
    const values = this.prediction(place, classNumber);
    for (let at = 0; at < values.length; at += 1) values[at] -= label[at];
    return values;
  }

  // entropy over all classes in bits: of a prediction, or of the mean of the raters if place is null
  entropy(place) {
    const maps = LAYOUT.classes.map((_, number) => (place === null ? this.label(number) : this.prediction(place, number)));
    const bits = new Float32Array(this.width * this.height);
    for (let at = 0; at < bits.length; at += 1) {
      let background = 1;
      for (const map of maps) {
        background -= map[at];
        if (map[at] > 0) bits[at] -= map[at] * Math.log2(map[at]);
      }
      // rounding leaves less than this
      if (background > 1e-5) bits[at] -= background * Math.log2(background);
    }
    return bits;
  }
}

const loaded = new Map();
function loadPictures(number) {
  if (!loaded.has(number)) {
    loaded.set(number, CasePictures.load(DATA.pictures[number]));
    // enough to step back and forth
    if (loaded.size > 12) loaded.delete(loaded.keys().next().value);
  }
  return loaded.get(number);
}

// RGBA of each value: `colour` writes red, green, blue and opacity, each up to 255, at a position.
function paint(values, colour) {
  const pixels = new Uint8ClampedArray(values.length * 4);
  for (let at = 0; at < values.length; at += 1) colour(values[at], pixels, at * 4);
  return pixels;
}

const greyPixels = (values) =>
  paint(values, (value, pixels, at) => {
    pixels[at] = pixels[at + 1] = pixels[at + 2] = value;
    pixels[at + 3] = 255;
  });

// values from 0 to `most`
const rampPixels = (values, colours = COLOURS, most = 1) =>
  paint(values, (value, pixels, at) => {
    const share = Math.min(1, Math.max(0, value / most));
    const colour = Math.round(share * 255) * 3;
    for (let part = 0; part < 3; part += 1) pixels[at + part] = colours[colour + part];
    pixels[at + 3] = 255 * Math.min(1, share / OPAQUE);
  });

const differencePixels = (values) =>
  paint(values, (value, pixels, at) => {
    const colour = value > 0 ? TOO_HIGH : TOO_LOW;
    for (let part = 0; part < 3; part += 1) pixels[at + part] = colour[part];
    pixels[at + 3] = 255 * Math.min(1, 1.5 * Math.abs(value));
  });

// The outline of a mask along the edges of its pixels, as a path. Each edge has the mask on its right; edges that
// meet are joined until the path is closed.
function outlinePath(mask, width, height) {
  const inside = (x, y) => x >= 0 && y >= 0 && x < width && y < height && mask[y * width + x] === 1;
  const ends = new Map();
  const key = (x, y) => y * (width + 1) + x;
  const add = (x1, y1, x2, y2) => {
    const from = key(x1, y1);
    if (ends.has(from)) ends.get(from).push([x2, y2]);
    else ends.set(from, [[x2, y2]]);
  };
  for (let y = 0; y < height; y += 1) {
    for (let x = 0; x < width; x += 1) {
      if (!inside(x, y)) continue;
      if (!inside(x, y - 1)) add(x, y, x + 1, y);
      if (!inside(x + 1, y)) add(x + 1, y, x + 1, y + 1);
      if (!inside(x, y + 1)) add(x + 1, y + 1, x, y + 1);
      if (!inside(x - 1, y)) add(x, y + 1, x, y);
    }
  }
  let path = "";
  for (const [start, first] of ends) {
    while (first.length > 0) {
      path += `M${start % (width + 1)} ${Math.floor(start / (width + 1))}`;
      let at = start;
      do {
        const [x, y] = ends.get(at).pop();
        path += `L${x} ${y}`;
        at = key(x, y);
      } while (at !== start && ends.get(at).length > 0);
      path += "Z";
    }
  }
  return path;
}

// Rows and columns around all drawn or probable pixels, with a margin, in the proportions of the picture.
function zoomWindow(pictures, classNumber) {
  const { width, height } = pictures;
  const seen = pictures.label(classNumber).map((value) => Number(value > 0));
  LAYOUT.methods.forEach((_, place) => {
    pictures.prediction(place, classNumber).forEach((value, at) => { if (value > 0.5) seen[at] = 1; });
  });
  let [left, right, top, bottom] = [width, -1, height, -1];
  seen.forEach((value, at) => {
    if (!value) return;
    const [x, y] = [at % width, Math.floor(at / width)];
    [left, right] = [Math.min(left, x), Math.max(right, x)];
    [top, bottom] = [Math.min(top, y), Math.max(bottom, y)];
  });
  if (right < 0) return { x: 0, y: 0, width, height };
  const share = Math.min(1, Math.max((right - left + 1) / width, (bottom - top + 1) / height, 12 / Math.min(width, height)) * 1.4);
  const [w, h] = [Math.max(1, Math.round(width * share)), Math.max(1, Math.round(height * share))];
  const within = (middle, size, length) => Math.round(Math.min(Math.max(0, middle - size / 2), length - size));
  return { x: within((left + right + 1) / 2, w, width), y: within((top + bottom + 1) / 2, h, height), width: w, height: h };
}
