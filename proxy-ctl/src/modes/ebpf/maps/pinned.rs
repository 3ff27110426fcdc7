//! The pinned maps of a dataplane, as files: their folder, shapes and pins, and when they may grow.

use std::{
    path::PathBuf,
    time::{Duration, Instant},
};

use proxy_common::inventory::Limit;

use super::{handles::Shape, paths::Paths, pins::MapPins};
use crate::modes::ebpf::Error;

/// Time after which growth is tried again if it has failed. Mostly, the kernel has no memory for
/// larger maps.
const REST: Duration = Duration::from_secs(60);

/// The maps in use, as they are pinned.
#[derive(Debug)]
pub(crate) struct PinnedMaps {
    bpffs: PathBuf,
    pub(crate) paths: Paths,
    pub(crate) shapes: Vec<Shape>,
    pins: MapPins,
    /// The end of the pause after maps could not grow.
    rests_until: Option<Instant>,
}

impl PinnedMaps {
    pub(crate) const fn new(bpffs: PathBuf, paths: Paths, shapes: Vec<Shape>, pins: MapPins) -> Self {
        Self { bpffs, paths, shapes, pins, rests_until: None }
    }

    /// Uses the maps of these shapes, which are pinned now.
    pub(crate) fn hold(&mut self, shapes: Vec<Shape>) -> Result<(), Error> {
        self.pins.hold_again(&self.paths, &shapes)?;
        self.shapes = shapes;
        Ok(())
    }

    /// Pins the maps in use again, in place of others.
    pub(crate) fn take_pins_back(&mut self) -> Result<(), Error> {
        self.pins.restore(&self.bpffs, &self.paths).map(drop)
    }

    /// Pins again whatever is not pinned any more.
    pub(crate) fn restore_pins(&mut self) -> Result<(), Error> {
        let restored = self.pins.restore(&self.bpffs, &self.paths)?;
        if !restored.is_empty() {
            tracing::warn!(
                maps = restored.join(" "),
                "another program had removed pins of maps; they are pinned again"
            );
        }
        Ok(())
    }

    /// Returns the limits whose maps may grow, because they are smaller than the limit. There are
    /// none while growth rests.
    pub(crate) fn may_grow(&self) -> Vec<Limit> {
        if self.rests_until.is_some_and(|until| Instant::now() < until) {
            return Vec::new();
        }
        let smaller = self.shapes.iter().filter(|shape| shape.entries < shape.most);
        smaller.filter_map(|shape| shape.limit).collect()
    }

    /// Lets growth rest, because it has failed.
    pub(crate) fn begin_rest(&mut self) {
        self.rests_until = Some(Instant::now() + REST);
    }

    /// Lets maps grow without the rest of the pause.
    pub(crate) fn end_rest(&mut self) {
        self.rests_until = None;
    }
}
