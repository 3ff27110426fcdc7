//! The lease of `ebpf.withdrawAfter`: an end time in a map, which the controller moves on while it
//! runs.
//!
//! If the controller is gone and the lease has ended, the programs pass all packets and system
//! calls untranslated, because the maps know nothing of what has changed since.

use std::time::Duration;

use proxy_common::layout::Lease;

use crate::{
    modes::ebpf::{
        Error,
        maps::handles::{CommonMaps, NamedMap},
    },
    sys::proc::clock,
};

/// The part of the lease's length, one in this number, after which the lease is renewed.
const RENEWED_AFTER: u32 = 4;

#[derive(Debug)]
pub(crate) struct LeaseRenewal {
    /// The length of the lease; zero if there is none.
    withdraw_after: Duration,
    /// When the lease is renewed next, in nanoseconds since boot.
    ///
    /// It is `None` if a predecessor's lease has ended. The maps are then not served before they
    /// hold what is desired.
    next: Option<u64>,
}

impl LeaseRenewal {
    /// Writes the first lease, before the programs that depend on it are attached.
    pub(crate) fn begin(withdraw_after: Duration, maps: &CommonMaps) -> Result<Self, Error> {
        let map = &maps.lease;
        if withdraw_after.is_zero() {
            map.set(&0, &Lease::default())?;
            return Ok(Self { withdraw_after, next: None });
        }
        let ended = map.get(&0)?.unwrap_or_default().has_ended(clock::since_boot());
        let mut renewal = Self { withdraw_after, next: (!ended).then_some(0) };
        renewal.renew(map)?;
        Ok(renewal)
    }

    /// Returns true if the lease has ended since this process renewed it last, as when the process
    /// was suspended. It is due then.
    pub(crate) fn has_lapsed(&mut self, map: &NamedMap<u32, Lease>) -> Result<bool, Error> {
        let has_lapsed =
            self.next.is_some() && map.get(&0)?.unwrap_or_default().has_ended(clock::since_boot());
        if has_lapsed {
            self.next = Some(0);
        }
        Ok(has_lapsed)
    }

    /// Renews the lease if it is time for that. Called about once a second.
    pub(crate) fn renew(&mut self, map: &NamedMap<u32, Lease>) -> Result<(), Error> {
        let now = clock::since_boot();
        if self.next.is_none_or(|next| now < next) {
            return Ok(());
        }
        map.set(&0, &Lease { end: clock::later(now, self.withdraw_after) })?;
        self.next = Some(clock::later(now, self.withdraw_after / RENEWED_AFTER));
        Ok(())
    }

    /// Renews a lease that had ended before this process started, so that the programs translate
    /// again. Returns true if it had ended. Called once the maps hold what is desired.
    pub(crate) fn resume(&mut self, map: &NamedMap<u32, Lease>) -> Result<bool, Error> {
        if self.next.is_some() || self.withdraw_after.is_zero() {
            return Ok(false);
        }
        self.next = Some(0);
        self.renew(map)?;
        tracing::info!("the lease had ended before this start; services are served again");
        Ok(true)
    }
}
