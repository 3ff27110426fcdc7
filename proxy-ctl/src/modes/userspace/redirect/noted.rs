//! Rules that are only noted, for tests.

use std::{
    collections::BTreeSet,
    io,
    net::IpAddr,
    sync::{Arc, Mutex, MutexGuard},
};

use super::{PortRedirects, Redirect, RedirectError, RedirectRules, Wanted};
use crate::{model::objects::IpFamily, sys::CallError};

#[derive(Debug, Default)]
pub(in crate::modes::userspace) struct Noted {
    /// True if writes are refused from now on.
    pub(in crate::modes::userspace) refuses: bool,
    pub(in crate::modes::userspace) node_addresses: BTreeSet<IpAddr>,
    /// The number of frontends that are redirected.
    pub(in crate::modes::userspace) frontends: usize,
}

#[derive(Clone, Default)]
pub(in crate::modes::userspace) struct Notes(Arc<Mutex<Noted>>);

impl Notes {
    pub(in crate::modes::userspace) fn look(&self) -> MutexGuard<'_, Noted> {
        self.0.lock().unwrap()
    }

    pub(in crate::modes::userspace) fn redirect(&self) -> Redirect {
        Redirect::new(Box::new(self.clone())).unwrap()
    }
}

impl RedirectRules for Notes {
    fn by(&self) -> String {
        "notes".to_owned()
    }

    fn families(&self) -> Vec<IpFamily> {
        vec![IpFamily::Ipv4]
    }

    fn change(
        &mut self,
        wanted: &Wanted,
        _go: &PortRedirects,
        _come: &PortRedirects,
    ) -> Result<(), RedirectError> {
        self.rewrite(wanted)
    }

    fn rewrite(&mut self, wanted: &Wanted) -> Result<(), RedirectError> {
        let mut noted = self.look();
        if noted.refuses {
            return Err(CallError::new("note", io::ErrorKind::ResourceBusy.into()).into());
        }
        noted.node_addresses = wanted.addresses.clone();
        noted.frontends = wanted.redirects().len();
        Ok(())
    }

    fn restore(&mut self, _wanted: &Wanted) -> Result<bool, RedirectError> {
        Ok(false)
    }
}
