//! Which mode the configuration leads to, and which is at work.

use crate::{
    dataplane::Modes,
    mode::{ChosenMode, Mode},
};

/// What the configuration and this node lead to.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct ModeChoice {
    pub chosen: ChosenMode,
    pub modes: Modes,
}

/// What serves the node now.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct ModeInForce {
    pub modes: Modes,
    /// The configuration leads to another mode, which could not take over: why.
    pub refused: Option<(Mode, String)>,
}

impl ModeInForce {
    pub fn new(modes: Modes) -> Self {
        Self { modes, refused: None }
    }
}
