// The field for the next message, and the images that are sent with it.

import { html, useEffect, useRef } from "./lib.js";
import { toast } from "./ui.js";

const MOST_IMAGES = 4,
  MOST_IMAGE_BYTES = 8 << 20;

export function Composer({ draft, setDraft, images, setImages, sees, busy, submit, stop, problem }) {
  const field = useRef(null),
    files = useRef(null);
  useEffect(() => {
    const box = field.current;
    box.style.height = "auto";
    box.style.height = `${Math.min(box.scrollHeight + 2, 240)}px`;
  }, [draft]);
  useEffect(() => {
    field.current.focus({ preventScroll: true });
  }, []);
  const add = async (list) => {
    for (const file of [...list].filter((one) => one.type.startsWith("image/"))) {
      if (file.size > MOST_IMAGE_BYTES) {
        toast(`${file.name} is larger than 8 MB.`, { kind: "failed" });
        continue;
      }
      const url = await new Promise((resolve) => {
        const reader = new FileReader();
        reader.onload = () => resolve(reader.result);
        reader.readAsDataURL(file);
      });
      setImages((all) => (all.length < MOST_IMAGES ? [...all, { name: file.name || "image", url }] : all));
    }
  };
  const onPaste = (event) => {
    if (sees && event.clipboardData.files.length) {
      event.preventDefault();
      add(event.clipboardData.files);
    }
  };
  const onKeyDown = (event) => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
      event.preventDefault();
      submit();
    } else if (event.key === "Escape" && busy) stop();
  };
  return html`<form class="composer card" onSubmit=${(event) => {
    event.preventDefault();
    submit();
  }}
      onDragOver=${(event) => {
        if (sees) event.preventDefault();
      }} onDrop=${(event) => {
        if (sees) {
          event.preventDefault();
          add(event.dataTransfer.files);
        }
      }}>
    ${
      images.length > 0 &&
      html`<div class="thumbs">${images.map(
        (image, index) => html`<span class="thumb"><img src=${image.url} alt=${image.name} />
      <button type="button" class="plain" aria-label=${`Remove ${image.name}`} onClick=${() => setImages(images.filter((_, at) => at !== index))}>✕</button></span>`,
      )}</div>`
    }
    ${images.length > 0 && !sees && html`<p class="callout notice flush">The chosen model reads text only, so the images are not sent.</p>`}
    <label class="unseen" for="prompt">Message</label>
    <textarea id="prompt" ref=${field} rows="1" dir="auto" placeholder="Message" value=${draft} onInput=${(event) => setDraft(event.target.value)} onKeyDown=${onKeyDown} onPaste=${onPaste}></textarea>
    <div class="composer-foot">
      ${
        sees &&
        html`<input ref=${files} type="file" accept="image/*" multiple hidden onChange=${(event) => {
          add(event.target.files);
          event.target.value = "";
        }} />
        <button type="button" class="button" onClick=${() => files.current.click()}>Add image</button>`
      }
      <span class="small soft">${problem ? "Correct the parameters first." : "Enter sends, Shift+Enter begins a line, Escape stops"}</span>
      ${busy ? html`<button type="button" class="button danger" onClick=${stop}>Stop</button>` : html`<button class="button primary" disabled=${Boolean(problem) || !(draft.trim() || images.length)}>Send</button>`}</div></form>`;
}
