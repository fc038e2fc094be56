"""Models whose blocks differ in kind: state-space and linear mixers, blocks without attention."""
