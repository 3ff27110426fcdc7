//! Where CPU time and memory go: samples of call stacks, for `serve/pages`.
//!
//! Samples are taken in signal handlers and inside the allocator. So nothing on the way to a sample waits, locks or
//! allocates, a forked child can be in the middle of it without harm, and all room for samples is set aside in static
//! arrays, which cost nothing until they are written.

pub mod cpu;
pub mod heap;
mod live;
pub mod names;
mod stacks;
