//! The state that all watchers share.

use std::sync::{Arc, atomic::AtomicBool};

use tokio::sync::mpsc;

use super::{connection::ApiConnection, state::SourceState};
use crate::source::Update;

#[derive(Clone)]
pub(super) struct WatchContext {
    pub(super) connection: Arc<ApiConnection>,
    pub(super) updates: mpsc::Sender<Update>,
    pub(super) state: SourceState,
    /// True if no streaming list is to be asked for: the configuration says so, or the API server
    /// has refused one.
    pub(super) plain_lists: Arc<AtomicBool>,
}
