//! Tests of the sources themselves. They need no root.
#![expect(clippy::unwrap_used, reason = "a test that cannot read the sources has failed")]

mod paths;
mod purity;
mod tree;
