import { Component, type ComponentChild, type FunctionComponent } from "preact";

/** A component that is drawn again only when its properties change (or differs says so): preact/compat's, without the
 * rest of it. same: whether two sets of properties look the same. */
export function memo<P extends object>(draw: FunctionComponent<P>, same: (before: P, after: P) => boolean = shallow) {
  return class Memo extends Component<P> {
    override shouldComponentUpdate(next: P): boolean {
      return !same(this.props as P, next);
    }

    override render(): ComponentChild {
      const Draw = draw;
      return <Draw {...(this.props as P)} />;
    }
  };
}

function shallow<P extends object>(before: P, after: P): boolean {
  const names = new Set([...Object.keys(before), ...Object.keys(after)]) as Set<keyof P>;
  return [...names].every((name) => name === "children" || before[name] === after[name]);
}
