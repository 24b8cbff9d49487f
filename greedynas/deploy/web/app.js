// Classifies a dropped image, a chosen one or the camera with the network in model.onnx, as `greedynas predict` does.
import * as ort from "./ort.wasm.min.mjs";

const SHOWN = 5; // classes
const element = (id) => document.getElementById(id);
const say = (text) => { element("status").textContent = text; };

ort.env.wasm.numThreads = 1; // more would need headers that a plain static server does not send
ort.env.wasm.wasmPaths = new URL("./", import.meta.url).href;

let card, session, busy = false;

// Return the weights of each input pixel for each output pixel: a triangle as wide as the reduction, as in Pillow.
function resizeWeights(from, to, start, length) {
  const scale = length / to, support = Math.max(scale, 1), weights = [];
  for (let i = 0; i < to; i++) {
    const centre = start + (i + 0.5) * scale;
    const first = Math.max(0, Math.trunc(centre - support + 0.5)), last = Math.min(from, Math.trunc(centre + support + 0.5));
    const row = [];
    for (let x = first; x < last; x++) row.push(Math.max(0, 1 - Math.abs((x + 0.5 - centre) / support)));
    const sum = row.reduce((total, value) => total + value, 0);
    weights.push({ first, row: row.map((value) => value / sum) });
  }
  return weights;
}

// Return the largest centred square of an image as bytes (side, side, channels); each pass rounds to bytes, as Pillow does.
function square({ data, width, height }, channels, side) {
  const shorter = Math.min(width, height);
  const across = resizeWeights(width, side, (width - shorter) / 2, shorter);
  const down = resizeWeights(height, side, (height - shorter) / 2, shorter);
  const narrow = new Uint8ClampedArray(height * side * channels), result = new Uint8ClampedArray(side * side * channels);
  for (let y = 0; y < height; y++)
    for (let x = 0; x < side; x++)
      for (let c = 0; c < channels; c++) {
        const { first, row } = across[x];
        let sum = 0;
        for (let k = 0; k < row.length; k++) sum += row[k] * data[(y * width + first + k) * channels + c];
        narrow[(y * side + x) * channels + c] = Math.floor(sum + 0.5);
      }
  for (let y = 0; y < side; y++)
    for (let x = 0; x < side; x++)
      for (let c = 0; c < channels; c++) {
        const { first, row } = down[y];
        let sum = 0;
        for (let k = 0; k < row.length; k++) sum += row[k] * narrow[((first + k) * side + x) * channels + c];
        result[(y * side + x) * channels + c] = Math.floor(sum + 0.5);
      }
  return result;
}

// Return the pixels of anything that a canvas can draw, on white, in colour or grey: { data, width, height }.
function pixelsOf(source, width, height, channels) {
  const canvas = new OffscreenCanvas(width, height), context = canvas.getContext("2d", { willReadFrequently: true });
  context.fillStyle = "white";
  context.fillRect(0, 0, width, height);
  context.drawImage(source, 0, 0);
  const rgba = context.getImageData(0, 0, width, height).data;
  const data = new Uint8ClampedArray(width * height * channels);
  for (let i = 0; i < width * height; i++) {
    const [r, g, b] = [rgba[4 * i], rgba[4 * i + 1], rgba[4 * i + 2]];
    if (channels === 1) data[i] = (r * 19595 + g * 38470 + b * 7471 + 0x8000) >> 16; // Pillow's grey
    else data.set([r, g, b], 3 * i);
  }
  return { data, width, height };
}

// Return the normalised centre of a square: float32 (1, channels, size, size).
function input(pixels, side) {
  const { image_size: size, image_channels: channels, mean, std } = card;
  const margin = Math.floor((side - size) / 2), values = new Float32Array(channels * size * size);
  for (let c = 0; c < channels; c++)
    for (let y = 0; y < size; y++)
      for (let x = 0; x < size; x++) {
        const value = pixels[((y + margin) * side + x + margin) * channels + c];
        values[(c * size + y) * size + x] = (value / 255 - mean[c]) / std[c];
      }
  return new ort.Tensor("float32", values, [1, channels, size, size]);
}

function showSeen(tensor) {
  const { image_size: size, image_channels: channels, mean, std } = card, canvas = element("seen");
  canvas.width = canvas.height = size;
  const image = new ImageData(size, size);
  for (let i = 0; i < size * size; i++) {
    for (let c = 0; c < 3; c++) {
      const from = channels === 1 ? 0 : c;
      image.data[4 * i + c] = (tensor.data[from * size * size + i] * std[from] + mean[from]) * 255;
    }
    image.data[4 * i + 3] = 255;
  }
  canvas.getContext("2d").putImageData(image, 0, 0);
  canvas.hidden = false;
}

function showClasses(logits) {
  const top = Math.max(...logits), powers = Array.from(logits, (value) => Math.exp(value - top));
  const sum = powers.reduce((total, value) => total + value, 0);
  const order = powers.map((value, i) => [value / sum, i]).sort((a, b) => b[0] - a[0]).slice(0, SHOWN);
  const rows = order.map(([probability, i]) => {
    const row = document.createElement("tr"), name = document.createElement("td"), share = document.createElement("td");
    name.textContent = card.class_names[i];
    share.textContent = `${(100 * probability).toFixed(2)}%`;
    row.append(name, share);
    return row;
  });
  element("result").tBodies[0].replaceChildren(...rows);
  element("result").hidden = false;
}

async function classify(source, width, height) {
  const side = Math.round(card.image_size / card.crop_fraction);
  const tensor = input(square(pixelsOf(source, width, height, card.image_channels), card.image_channels, side), side);
  const start = performance.now();
  const { logits } = await session.run({ images: tensor });
  showSeen(tensor);
  showClasses(logits.data);
  return performance.now() - start;
}

async function classifyFile(file) {
  if (!file || busy) return;
  busy = true;
  try {
    const image = await createImageBitmap(file, { colorSpaceConversion: "none" });
    const time = await classify(image, image.width, image.height);
    say(`${file.name}: classified in ${time.toFixed(1)} ms`);
  } catch (error) {
    element("result").hidden = true;
    say(`${file.name} cannot be classified: ${error.message}`);
  } finally {
    busy = false;
  }
}

async function useCamera() {
  const video = element("video");
  try {
    video.srcObject = await navigator.mediaDevices.getUserMedia({ video: { facingMode: "environment" } });
    await video.play();
  } catch (error) {
    say(`The camera cannot be used: ${error.message}`);
    return;
  }
  video.hidden = false;
  const next = async () => {
    if (!busy && video.videoWidth) {
      busy = true;
      try {
        say(`Camera: classified in ${(await classify(video, video.videoWidth, video.videoHeight)).toFixed(1)} ms`);
      } finally {
        busy = false;
      }
    }
    requestAnimationFrame(next);
  };
  next();
}

async function start() {
  try {
    card = await (await fetch("model.json")).json();
    session = await ort.InferenceSession.create("model.onnx", { executionProviders: ["wasm"] });
  } catch (error) {
    say(`The network cannot be loaded: ${error.message}. Open this page from a web server, not as a file.`);
    return;
  }
  element("file").disabled = element("camera").disabled = false;
  element("file").addEventListener("change", (event) => classifyFile(event.target.files[0]));
  element("camera").addEventListener("click", useCamera);
  const drop = element("drop");
  drop.addEventListener("dragover", (event) => { event.preventDefault(); drop.classList.add("over"); });
  drop.addEventListener("dragleave", () => drop.classList.remove("over"));
  drop.addEventListener("drop", (event) => {
    event.preventDefault();
    drop.classList.remove("over");
    classifyFile(event.dataTransfer.files[0]);
  });
  document.title = document.querySelector("h1").textContent = `${card.name}: image classifier`;
  say("Ready.");
}

start();
