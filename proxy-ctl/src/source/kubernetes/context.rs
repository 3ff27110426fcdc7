//! What every watcher needs.

use std::sync::Arc;

use tokio::sync::mpsc;

use super::{connection::ApiConnection, state::SourceState, streaming::StreamingLists};
use crate::source::Update;

#[derive(Clone)]
pub(super) struct WatchContext {
    pub(super) connection: Arc<ApiConnection>,
    pub(super) updates: mpsc::Sender<Update>,
    pub(super) state: SourceState,
    pub(super) streaming: Arc<StreamingLists>,
}
