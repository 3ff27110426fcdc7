//! Tests of the room in maps: what is freed, what grows, and who gives way.

mod grace;
mod growth;
mod resize;
mod room;
