//! What every watcher needs.

use std::sync::{Arc, atomic::AtomicBool};

use tokio::sync::mpsc;

use super::{connection::ApiConnection, state::SourceState};
use crate::source::Update;

#[derive(Clone)]
pub(super) struct WatchContext {
    pub(super) connection: Arc<ApiConnection>,
    pub(super) updates: mpsc::Sender<Update>,
    pub(super) state: SourceState,
    /// Ask for no streaming list: the configuration says so, or the API server has refused one.
    pub(super) plain_lists: Arc<AtomicBool>,
}
