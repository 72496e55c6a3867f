// What the views with a canvas share: its size in pixels of the device, and the theme's colours.
import type { RefObject } from "preact";
import { useEffect, useRef, useState } from "preact/hooks";

export interface Size {
  width: number;
  height: number;
  scale: number;
}

/** The size of an element, as it changes. width, height: in CSS pixels; scale: pixels of the device in each. */
export function useSize<T extends HTMLElement>(): [RefObject<T | null>, Size] {
  const element = useRef<T>(null);
  const [size, setSize] = useState<Size>({ width: 0, height: 0, scale: 1 });
  useEffect(() => {
    const measured = element.current;
    if (!measured) return;
    const measure = () => {
      const next = { width: measured.clientWidth, height: measured.clientHeight, scale: window.devicePixelRatio || 1 };
      setSize((last) => (same(last, next) ? last : next));
    };
    const observer = new ResizeObserver(measure);
    observer.observe(measured);
    window.addEventListener("resize", measure); // the scale changes without the size
    measure();
    return () => {
      observer.disconnect();
      window.removeEventListener("resize", measure);
    };
  }, []);
  return [element, size];
}

function same(one: Size, other: Size): boolean {
  return one.width === other.width && one.height === other.height && one.scale === other.scale;
}

/** A custom property's value, where an element stands. */
export function property(element: Element, name: string): string {
  return getComputedStyle(element).getPropertyValue(name).trim();
}

/** Give a canvas so many pixels, only where it has others: that empties it. */
export function fit(canvas: HTMLCanvasElement, width: number, height: number): CanvasRenderingContext2D | null {
  if (canvas.width !== width) canvas.width = width;
  if (canvas.height !== height) canvas.height = height;
  return canvas.getContext("2d");
}
