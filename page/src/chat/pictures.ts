// Pictures on their way into a prompt: dropped, pasted or chosen.
import { signal } from "@preact/signals";
import { info } from "../server";
import type { Picture } from "./types";

const MOST = 16;

/** Those that the next prompt has. */
export const pictures = signal<Picture[]>([]);
/** Why one was not taken. */
export const pictureTrouble = signal<string | null>(null);

export async function addPictures(files: Iterable<File> | null | undefined): Promise<void> {
  const given = [...(files ?? [])];
  if (given.length === 0) return;
  pictureTrouble.value = null;
  if (!info.value?.images) {
    pictureTrouble.value = `${info.value?.model ?? "This model"} takes no pictures.`;
    return;
  }
  for (const file of given) {
    if (!file.type.startsWith("image/")) pictureTrouble.value = `${file.name} is no picture.`;
    else if (pictures.value.length >= MOST) pictureTrouble.value = `${MOST} pictures are the most a prompt takes here.`;
    else pictures.value = [...pictures.value, { name: file.name, url: await dataUrl(file) }];
  }
}

function dataUrl(file: File): Promise<string> {
  return new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.onload = () => resolve(String(reader.result));
    reader.onerror = () => reject(reader.error ?? new Error(`${file.name} cannot be read.`));
    reader.readAsDataURL(file);
  });
}
