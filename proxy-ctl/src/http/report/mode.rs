//! The mode that results from the configuration, and the active mode.

use crate::{
    model::mode::{ChosenMode, Mode},
    modes::Modes,
};

/// The modes that follow from the configuration and this node.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct ModeChoice {
    pub chosen: ChosenMode,
    pub modes: Modes,
}

/// The modes that serve the node now.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct ModeInForce {
    pub modes: Modes,
    /// The mode that results from the configuration, if it could not take over, and the reason.
    pub refused: Option<(Mode, String)>,
}

impl ModeInForce {
    pub fn new(modes: Modes) -> Self {
        Self { modes, refused: None }
    }
}
