//! The watchers, which list and follow each kind of object, and send what has changed.

pub(super) mod context;
mod follow;
mod health;
pub(super) mod kind;
mod objects;
mod parsed;
pub(super) mod query;
pub(super) mod resource;
pub(super) mod state;
mod watcher;
pub(super) mod watchers;
