// What was dropped or chosen, as files with their paths: of a folder, all that is in it.
import type { Chosen } from "./files";

const MOST = 2000; // files that are looked at: a home folder that was dropped by mistake must not hang the page

/** The files of a file input; a folder's have the folder's name before theirs. */
export function chosenFiles(list: FileList | null): Chosen[] {
  return [...(list ?? [])].slice(0, MOST).map((file) => ({ path: file.webkitRelativePath || file.name, file }));
}

/** The files of a drop, folders and what is in them too. Call it within the event: later its items are gone. */
export async function droppedFiles(transfer: DataTransfer): Promise<Chosen[]> {
  const found: Chosen[] = [];
  const entries: FileSystemEntry[] = [];
  for (const item of transfer.items) {
    const entry = item.webkitGetAsEntry();
    const file = item.getAsFile();
    if (entry !== null) entries.push(entry);
    else if (file !== null) found.push({ path: file.name, file }); // dropped by a script, not from a folder
  }
  for (const entry of entries) await gather(entry, entry.name, found);
  return found;
}

async function gather(entry: FileSystemEntry, path: string, found: Chosen[]): Promise<void> {
  if (found.length >= MOST) return;
  if (entry.isFile) {
    const file = await new Promise<File>((resolve, reject) => (entry as FileSystemFileEntry).file(resolve, reject));
    found.push({ path, file });
    return;
  }
  const reader = (entry as FileSystemDirectoryEntry).createReader();
  for (;;) {
    const part = await new Promise<FileSystemEntry[]>((resolve, reject) => reader.readEntries(resolve, reject));
    if (part.length === 0) return;
    for (const child of part) await gather(child, `${path}/${child.name}`, found);
  }
}
