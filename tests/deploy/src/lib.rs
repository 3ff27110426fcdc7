//! What the tests of deploy/ have in common: the files, the tools that others check such files with, and an image
//! as a container runtime gets it.

pub mod api;
pub mod files;
pub mod image;
pub mod promql;
pub mod tools;
