// Which of the files that somebody chose are sent. No browser in here but its File.

const CONFIG = "adapter_config.json";
const WEIGHTS = "adapter_model.safetensors";

/** A file, and its path within what was chosen. */
export interface Chosen {
  path: string;
  file: Blob;
}

/** What is sent, and what is not. name: what the adapter could be called, by its folder or archive. */
export interface Parcel {
  files: Chosen[];
  bytes: number;
  leftOut: string[];
  name: string;
  /** Why nothing can be sent. */
  problem: string | null;
}

/**
 * The adapter among chosen files: one .zip, files as they are, or of a folder the two files that an adapter is.
 *
 * Files that were chosen one by one are all sent, so that the server says what is wrong with them. Of a folder, which
 * may have gigabytes of checkpoints, two are.
 */
export function choose(chosen: Chosen[]): Parcel {
  const [first] = chosen;
  if (!first) return parcel([], [], "", "There is no file in it.");
  if (chosen.length === 1 && /\.zip$/i.test(first.path)) return parcel(chosen, [], stem(first.path), null);
  if (chosen.every(({ path }) => !path.includes("/"))) return parcel(chosen, [], "", null);
  const folders = chosen.map(({ path }) => path).filter((path) => last(path) === CONFIG).map(folderOf);
  const depth = Math.min(...folders.map(depthOf));
  const outer = folders.filter((folder) => depthOf(folder) === depth);
  const [folder] = outer;
  if (folder === undefined) return parcel([], [], "", `There is no ${CONFIG} in this folder.`);
  if (outer.length > 1) return parcel([], [], "", `There are ${outer.length} adapters in it (${outer.map(last).join(", ")}): choose the folder of one.`);
  const wanted = new Set([`${folder}/${CONFIG}`, `${folder}/${WEIGHTS}`]);
  const files = chosen.filter(({ path }) => wanted.has(path));
  const leftOut = chosen.filter(({ path }) => !wanted.has(path)).map(({ path }) => path);
  const problem = files.length < 2 ? `There is no ${WEIGHTS} in this folder: adapters are read from safetensors alone.` : null;
  return parcel(files, leftOut, last(folder), problem);
}

function parcel(files: Chosen[], leftOut: string[], name: string, problem: string | null): Parcel {
  return { files, bytes: files.reduce((sum, { file }) => sum + file.size, 0), leftOut, name, problem };
}

/** The last part of a path. */
export function last(path: string): string {
  return path.slice(path.lastIndexOf("/") + 1);
}

function folderOf(path: string): string {
  return path.slice(0, Math.max(0, path.lastIndexOf("/")));
}

function depthOf(folder: string): number {
  return folder.split("/").length;
}

function stem(path: string): string {
  return last(path).replace(/\.zip$/i, "");
}

/** Folders' parts in order: {"q_proj": 6, "v_proj": 6} as the many first, then by name. */
export function targetsInOrder(targets: Record<string, number>): [string, number][] {
  return Object.entries(targets).sort(([a, many], [b, more]) => more - many || (a < b ? -1 : 1));
}
