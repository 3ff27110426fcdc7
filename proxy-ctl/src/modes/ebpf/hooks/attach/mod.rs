//! Attaches the programs to the cgroup, to both directions of each interface, and to the XDP hook
//! of uplinks.
//!
//! Links are pinned, so that they outlive the controller, and get new programs in one step. Kernels
//! without tcx (before 6.6) have filters on a clsact qdisc instead, which live as long as the
//! interface. A folder on the bpffs remembers them.

mod completeness;
pub(crate) mod filters;
mod refused;
pub(crate) mod sockets;

use std::{
    collections::{BTreeMap, BTreeSet},
    path::PathBuf,
    time::{Duration, Instant},
};

use proxy_common::inventory::program;

use self::{
    filters::{exists, has_filter, remove_filter, remove_filters},
    refused::Refusal,
    sockets::Cgroup,
};
use super::{
    load::{Programs, common_packet_programs, packet_program},
    order::{HookOrder, OutOfOrder},
    program_log::KernelLog,
    refusal::is_refused,
    route_watch::RouteWatch,
    settling::Settling,
    xdp::attach::{Redirects, XdpHooks},
};
use crate::{
    config::{Ebpf, SocketLoadBalancing},
    model::node::{Interface, Role},
    modes::ebpf::{
        Error,
        maps::{
            paths::{Paths, names},
            pins::{Ensured, LinkPins},
        },
        services::writer::Failures,
    },
    sys::{
        CallError,
        bpf::{self, LinkTarget},
        net::tc::{self, Direction},
    },
};

fn packet_programs(interface: &Interface) -> [&'static str; 2] {
    Direction::ALL.map(|direction| packet_program(interface.role, direction, interface.ethernet))
}

/// The programs, and where they are attached.
#[derive(Debug)]
pub(crate) struct Hooks {
    paths: Paths,
    programs: Programs,
    /// Log of the programs.
    log: KernelLog,
    /// True if all hooks run programs of the maps in use.
    are_swapped: bool,
    cgroup: Option<Cgroup>,
    /// True if sockets are counted as connections, so that the hook `sock_release` is attached too.
    counts_sockets: bool,
    links: LinkPins,
    /// True if the kernel has tcx. `None` if that was not tried yet.
    tcx: Option<bool>,
    interfaces: BTreeMap<u32, Interface>,
    /// Refusals of the workload interfaces that have no programs, by interface index.
    unattached: BTreeMap<u32, Refusal>,
    /// Kinds of the ingress qdiscs, by interface index, as they were listed last. They are listed
    /// only on kernels without tcx.
    qdiscs: BTreeMap<u32, String>,
    /// New workload interfaces, which others may still change. It is used without tcx only.
    settling: Settling,
    /// Duration for which a new workload interface is left alone after its last change, on a kernel
    /// without tcx.
    pause: Duration,
    /// True if CNI's bandwidth plugin was seen on the node.
    is_beside_plugin: bool,
    /// Processes whose connections socket hooks translate.
    sockets: SocketLoadBalancing,
    /// The direction of each interface at which attaching has failed last. It is tried first, so
    /// that packets are not translated in one direction alone for a moment at each attempt.
    failed_last: BTreeMap<u32, Direction>,
    /// Interfaces at which the last attempt has left a program that was there before.
    unswapped: BTreeSet<u32>,
    /// True if the last attempt to attach the socket hooks has failed.
    have_sockets_failed: bool,
    order: HookOrder,
    xdp: XdpHooks,
    /// Watch of the routes, while one of the uplinks has XDP.
    route_watch: Option<RouteWatch>,
    /// True if the watch could not begin, and the log has said so.
    is_watch_missed: bool,
}

impl Hooks {
    /// Creates the hooks. The socket hooks go to `cgroup`; `None` detaches those of a former
    /// controller.
    pub(crate) fn new(
        paths: Paths,
        (programs, log): (Programs, KernelLog),
        cgroup: Option<Cgroup>,
        config: &Ebpf,
    ) -> Self {
        Self {
            paths,
            programs,
            log,
            are_swapped: true,
            cgroup,
            counts_sockets: false,
            links: LinkPins::default(),
            tcx: None,
            interfaces: BTreeMap::new(),
            unattached: BTreeMap::new(),
            qdiscs: BTreeMap::new(),
            settling: Settling::default(),
            pause: Duration::ZERO,
            is_beside_plugin: false,
            sockets: config.sockets(),
            failed_last: BTreeMap::new(),
            unswapped: BTreeSet::new(),
            have_sockets_failed: false,
            order: HookOrder::default(),
            xdp: XdpHooks::new(config.xdp),
            route_watch: None,
            is_watch_missed: false,
        }
    }

    /// Uses clsact filters also where the kernel has tcx.
    pub(crate) fn without_tcx(&mut self) {
        self.tcx = Some(false);
    }

    /// Sets whether sockets are counted as connections until they are closed. The hook for closed
    /// sockets is attached or detached by the next [`attach_release`](Self::attach_release), which
    /// [`attach_sockets`](Self::attach_sockets) calls too.
    pub(crate) const fn count_sockets(&mut self, are_counted: bool) {
        self.counts_sockets = are_counted;
    }

    /// Attaches to exactly these interfaces. What is attached already is looked at again, so that a
    /// link that somebody removed comes back. A new workload interface may have to wait for
    /// [`attach_settled`](Self::attach_settled).
    pub(crate) fn follow(&mut self, interfaces: &[Interface], now: Instant) -> Failures {
        let mut failures = Failures::default();
        self.settling.see(interfaces, now);
        self.list_qdiscs(&mut failures);
        let mut gone: Vec<u32> = match self.attached() {
            Ok(indexes) => indexes,
            Err(error) => {
                failures.add("links of a predecessor", error);
                Vec::new()
            }
        };
        gone.extend(self.interfaces.keys().filter(|index| self.unattached.contains_key(index)));
        gone.retain(|index| interfaces.iter().all(|interface| interface.index != *index));
        for index in gone {
            if let Err(error) = self.detach(index) {
                failures.add(format_args!("interface {index}"), error);
            }
        }
        if let Err(error) = self.programs.load_all(interfaces.iter().flat_map(packet_programs)) {
            failures.add("packet programs", error);
        }
        for interface in uplinks_first(interfaces) {
            // The interface is kept even if attaching fails, so that it is tried again.
            self.interfaces.insert(interface.index, interface.clone());
            if !self.is_waiting(interface) {
                self.attach_or_note(interface, &mut failures);
            }
        }
        failures
    }

    /// Attaches to the interfaces whose wait is over, and returns true if there were any.
    pub(crate) fn attach_settled(&mut self, now: Instant) -> (bool, Failures) {
        let mut failures = Failures::default();
        let interfaces: Vec<Interface> =
            self.settling.waiting().filter_map(|index| self.interfaces.get(&index)).cloned().collect();
        if interfaces.is_empty() {
            return (false, failures);
        }
        self.list_qdiscs(&mut failures);
        let mut any = false;
        for interface in &interfaces {
            self.settling.settle_after(interface, now, self.pause);
            if !self.is_waiting(interface) {
                any = true;
                self.attach_or_note(interface, &mut failures);
            }
        }
        (any, failures)
    }

    /// Returns true if the interface waits for [`attach_settled`](Self::attach_settled). An
    /// interface that has an ingress qdisc does not wait: either that is clsact, or nothing can be
    /// attached.
    fn is_waiting(&mut self, interface: &Interface) -> bool {
        let index = interface.index;
        if self.tcx.unwrap_or_else(|| tc::has_tcx(index)) || self.qdiscs.contains_key(&index) {
            self.settling.settle(index);
        }
        !self.settling.is_settled(interface, self.pause)
    }

    /// Attaches to an interface, and returns true if anything had to be done. A refusal of a
    /// workload interface is noted, and fails no call: trying again at once cannot cure it, and
    /// everything else is served.
    fn attach_or_note(&mut self, interface: &Interface, failures: &mut Failures) -> bool {
        let index = interface.index;
        match self.attach(interface, failures) {
            Ok(changed) => {
                if self.unattached.remove(&index).is_some() {
                    tracing::info!(interface = interface.name, "packet programs are attached now");
                }
                return changed;
            }
            Err(Error::Attach { source, .. }) if source.errno() == libc::ENODEV => {
                self.unswapped.remove(&index);
                self.failed_last.remove(&index);
                tracing::debug!(interface = interface.name, "interface vanished while being attached");
            }
            Err(error) if interface.role == Role::Workload && is_refused(&error) => {
                self.note_refusal(interface, &error);
            }
            Err(error) => {
                if interface.role == Role::Uplink {
                    self.unattached.remove(&index);
                }
                failures.add(&interface.name, error);
            }
        }
        false
    }

    /// Returns true if programs of ours, or of a former controller, are at any interface, or if
    /// that is unknown.
    pub(crate) fn are_at_interfaces(&self) -> bool {
        self.attached().map_or(true, |indexes| !indexes.is_empty())
    }

    /// Removes the pins of links whose interface is gone.
    pub(crate) fn tend(&mut self) -> Result<(), Error> {
        let gone: Vec<u32> = self.interfaces.keys().copied().filter(|index| !exists(*index)).collect();
        for index in gone {
            self.detach(index)?;
        }
        Ok(())
    }

    /// Attaches our links and filters again that another program has removed.
    pub(crate) fn repair(&mut self) -> Failures {
        self.attach_all(|interface| match interface {
            None => {
                tracing::warn!("another program had removed socket hooks; they are attached and pinned again")
            }
            Some(interface) => tracing::warn!(
                interface = interface.name,
                "another program had removed packet programs; they are attached and pinned again"
            ),
        })
    }

    /// Makes every hook run the programs that are loaded.
    fn swap(&mut self) -> Failures {
        self.attach_all(|_| ())
    }

    /// Attaches everything, and calls `changed` where anything had to be done: with the interface,
    /// or with `None` for the socket hooks.
    fn attach_all(&mut self, changed: impl Fn(Option<&Interface>)) -> Failures {
        let mut failures = Failures::default();
        self.list_qdiscs(&mut failures);
        let sockets = self.attach_sockets();
        self.have_sockets_failed = sockets.is_err();
        match sockets {
            Ok(false) => {}
            Ok(true) => changed(None),
            Err(error) => failures.add("socket hooks", error),
        }
        let interfaces: Vec<Interface> = self.interfaces.values().cloned().collect();
        for interface in uplinks_first(&interfaces) {
            let was_refused = self.unattached.contains_key(&interface.index);
            if !self.is_waiting(interface) && self.attach_or_note(interface, &mut failures) && !was_refused {
                changed(Some(interface));
            }
        }
        failures
    }

    /// Returns the hooks where another program has come before ours, and ours is to be moved. Only
    /// hooks with tcx are returned, because a filter of clsact keeps the priority that it has got.
    pub(crate) fn out_of_order(&mut self) -> Result<Vec<OutOfOrder>, Error> {
        if self.tcx != Some(true) {
            return Ok(Vec::new());
        }
        let mut out_of_order = Vec::new();
        for interface in self.interfaces.values() {
            for direction in Direction::ALL {
                let name = packet_program(interface.role, direction, interface.ethernet);
                let program = bpf::program_id(self.programs.get(name)?).map_err(|source| Error::Attach {
                    program: name,
                    target: interface.name.clone(),
                    source,
                })?;
                if self.order.is_to_be_repaired(interface, direction, program) {
                    out_of_order.push(OutOfOrder { interface: interface.clone(), direction });
                }
            }
        }
        Ok(out_of_order)
    }

    /// Puts our programs back to the first position of these hooks, and swaps all others for
    /// these programs too.
    ///
    /// The programs are loaded anew, because the kernel takes a program only once at a hook, and no
    /// packet may meet none. For the time of a system call, a packet meets both. The second one
    /// finds it translated.
    pub(crate) fn move_first(
        &mut self,
        loaded: (Programs, KernelLog),
        out_of_order: &[OutOfOrder],
    ) -> Failures {
        (self.programs, self.log) = loaded;
        let mut failures = Failures::default();
        for OutOfOrder { interface, direction } in out_of_order {
            match self.move_link(interface, *direction) {
                Ok(()) => tracing::warn!(
                    interface = interface.name,
                    hook = direction.name(),
                    "another program had come before the proxy's, which is the first again"
                ),
                Err(Error::Attach { source, .. }) if source.errno() == libc::ENODEV => {}
                Err(error) => failures.add(&interface.name, error),
            }
        }
        failures.merge(self.swap());
        failures
    }

    /// Lets no flow open for this time, or until [`let_open`](Self::let_open).
    pub(crate) fn hold_openings(&self, time: Duration) -> Result<(), Error> {
        self.programs.hold_openings(time)
    }

    /// Lets flows open again.
    pub(crate) fn let_open(&self) -> Result<(), Error> {
        self.programs.let_open()
    }

    /// Loads all of these programs that the hooks need.
    pub(crate) fn load(&self, programs: &mut Programs) -> Result<(), Error> {
        if self.cgroup.is_some() && self.counts_sockets {
            programs.get(program::sock_release)?;
        }
        programs.load_all(self.interfaces.values().flat_map(packet_programs))?;
        if let Some(program) = self.xdp.program() {
            // If the kernel refuses the program, the call that attaches it reports that.
            let _loaded = programs.get(program);
        }
        Ok(())
    }

    /// Returns why uplinks have no XDP program, by interface index.
    pub(crate) const fn refusals(&self) -> &BTreeMap<u32, String> {
        self.xdp.refusals()
    }

    /// Returns between which interfaces XDP may redirect packets.
    pub(crate) fn redirects(&self) -> Redirects {
        self.xdp.redirects()
    }

    /// Starts a [`RouteWatch`] if an uplink has an XDP program and no watch runs. If it cannot
    /// begin, the next check of the uplinks tries again.
    pub(crate) fn follow_routes(&mut self) {
        if self.xdp.program().is_none() || self.route_watch.as_ref().is_some_and(|watch| !watch.has_ended()) {
            return;
        }
        match RouteWatch::begin(&self.paths.maps()) {
            Ok(watch) => (self.route_watch, self.is_watch_missed) = (Some(watch), false),
            Err(error) if !self.is_watch_missed => {
                tracing::warn!(%error, "packets that XDP forwards follow a changed route up to a second late");
                self.is_watch_missed = true;
            }
            Err(_) => {}
        }
    }

    /// Writes what the programs have logged.
    pub(crate) fn follow_log(&mut self) -> Result<(), Error> {
        self.log.follow()
    }

    /// Loads the programs that most nodes need, before the interfaces are known.
    pub(crate) fn load_ahead(&mut self) -> Result<(), Error> {
        self.programs.load_all(common_packet_programs())
    }

    fn move_link(&mut self, interface: &Interface, direction: Direction) -> Result<(), Error> {
        let name = packet_program(interface.role, direction, interface.ethernet);
        let path = self.link_path(interface.index, direction);
        let target = || format!("{} ({})", interface.name, direction.name());
        let new = bpf::link_tcx(self.programs.get(name)?, interface.index, direction.tcx_hook())
            .map_err(|source| Error::Attach { program: name, target: target(), source })?;
        self.links.replace(&path, new)
    }

    /// Returns the indexes of the interfaces that have links or filters of ours. They come from the
    /// pins, and from the links that are held after another program has removed their pins.
    fn attached(&self) -> Result<Vec<u32>, Error> {
        let links = names(&self.paths.links())?;
        let held = self.links.paths().filter_map(|path| path.file_name()?.to_str());
        let mut found: Vec<u32> = links
            .iter()
            .map(String::as_str)
            .chain(held)
            .filter_map(|name| name.split_once('_')?.0.parse().ok())
            .chain(names(&self.paths.clsact())?.iter().filter_map(|name| name.parse().ok()))
            .collect();
        found.sort_unstable();
        found.dedup();
        Ok(found)
    }

    /// Attaches to both directions of an interface, and returns true if anything had to be done.
    /// What ran before an error runs on. After an error at a workload interface, what this call has
    /// attached to it is taken back. If the interface refuses programs, everything that is attached
    /// to it is.
    fn attach(&mut self, interface: &Interface, failures: &mut Failures) -> Result<bool, Error> {
        let (mut changed, mut attached, mut failed) = (false, Vec::new(), None);
        self.unswapped.remove(&interface.index);
        for direction in failed_first(self.failed_last.remove(&interface.index)) {
            // A program that is there, or may be, is swapped even after an error, because it may
            // use former maps.
            if failed.is_some() && !self.has_program(interface.index, direction).unwrap_or(true) {
                continue;
            }
            match self.attach_direction(interface, direction) {
                Ok(ensured) => {
                    changed |= ensured.is_change();
                    attached.extend((ensured == Ensured::Attached).then_some(direction));
                }
                Err(error) => {
                    if self.has_program(interface.index, direction).unwrap_or(true) {
                        self.unswapped.insert(interface.index);
                    }
                    if failed.is_none() {
                        self.failed_last.insert(interface.index, direction);
                        failed = Some(error);
                    }
                }
            }
        }
        if let Some(error) = failed {
            if interface.role == Role::Workload
                && let Err(error) = self.undo(interface.index, &attached, is_refused(&error))
            {
                failures.add(&interface.name, error);
            }
            return Err(error);
        }
        // XDP is attached last and detached first, because packets that it leaves to the stack need
        // the programs at TC.
        let Self { paths, programs, links, xdp, .. } = self;
        let forwarding = xdp.attach(paths, programs, links, interface);
        if forwarding.is_err() {
            self.unswapped.insert(interface.index);
        }
        Ok(changed | forwarding?)
    }

    fn attach_direction(&mut self, interface: &Interface, direction: Direction) -> Result<Ensured, Error> {
        let program = packet_program(interface.role, direction, interface.ethernet);
        let failed = |source| Error::Attach {
            program,
            target: format!("{} ({})", interface.name, direction.name()),
            source,
        };
        if self.tcx != Some(false) {
            match self.attach_tcx(interface.index, direction, program)? {
                Ok(ensured) => {
                    self.tcx = Some(true);
                    return Ok(ensured);
                }
                // Kernels before 6.6 do not know this attach type. Once tcx has worked, EINVAL is a
                // real error.
                Err(e) if e.errno() == libc::EINVAL && self.tcx.is_none() => self.tcx = Some(false),
                Err(e) => return Err(failed(e)),
            }
        }
        self.attach_filter(interface.index, direction, program)?.map_err(failed)
    }

    /// Returns true if there is a link or filter of ours or of a former controller.
    fn has_program(&self, index: u32, direction: Direction) -> Result<bool, Error> {
        if self.tcx == Some(false) {
            return has_filter(index, direction);
        }
        self.links.has(&self.link_path(index, direction))
    }

    /// Detaches from a workload interface what one call has attached before it failed. If the
    /// interface refuses programs, nothing stays attached. One direction alone would translate
    /// packets whose answers stay untranslated, and which the secondary mode could serve.
    fn undo(&mut self, index: u32, attached: &[Direction], is_refused: bool) -> Result<(), Error> {
        if !is_refused {
            return self.take_back(index, attached);
        }
        self.xdp.detach(&self.paths, &mut self.links, index)?;
        self.remove_packet_programs(index)?;
        self.unswapped.remove(&index);
        Ok(())
    }

    /// Detaches from these directions of an interface. Programs of the other directions stay.
    fn take_back(&mut self, index: u32, attached: &[Direction]) -> Result<(), Error> {
        if self.tcx != Some(false) {
            return attached
                .iter()
                .try_for_each(|direction| self.links.remove(&self.link_path(index, *direction)).map(drop));
        }
        for direction in Direction::ALL.into_iter().filter(|direction| !attached.contains(direction)) {
            if has_filter(index, direction)? {
                let remove = |direction: &Direction| remove_filter(index, *direction).map(drop);
                return attached.iter().try_for_each(remove);
            }
        }
        remove_filters(&self.paths, index).map(drop)
    }

    fn link_path(&self, index: u32, direction: Direction) -> PathBuf {
        self.paths.links().join(format!("{index}_{}", direction.name()))
    }

    fn attach_tcx(
        &mut self,
        index: u32,
        direction: Direction,
        name: &'static str,
    ) -> Result<Result<Ensured, CallError>, Error> {
        let path = self.link_path(index, direction);
        let program = self.programs.get(name)?;
        let create = || bpf::link_tcx(program, index, direction.tcx_hook());
        Ok(self.links.ensure(&path, program, |target| target == LinkTarget::Tcx(index), create))
    }

    fn detach(&mut self, index: u32) -> Result<(), Error> {
        self.interfaces.remove(&index);
        self.unattached.remove(&index);
        self.failed_last.remove(&index);
        self.unswapped.remove(&index);
        self.order.forget(index);
        self.xdp.detach(&self.paths, &mut self.links, index)?;
        self.remove_packet_programs(index)
    }

    fn remove_packet_programs(&mut self, index: u32) -> Result<(), Error> {
        for direction in Direction::ALL {
            self.links.remove(&self.link_path(index, direction))?;
        }
        remove_filters(&self.paths, index)?;
        Ok(())
    }
}

/// Returns the directions in the order in which they are attached. The one that has failed last
/// comes first. Otherwise egress does, where the answers to what ingress translates are translated
/// back.
fn failed_first(failed: Option<Direction>) -> [Direction; 2] {
    match failed {
        Some(Direction::Ingress) => [Direction::Ingress, Direction::Egress],
        None | Some(Direction::Egress) => [Direction::Egress, Direction::Ingress],
    }
}

/// Returns uplinks before workload interfaces, because what XDP does with packets to pods depends
/// on uplinks.
fn uplinks_first(interfaces: &[Interface]) -> impl Iterator<Item = &Interface> {
    let of = |role| interfaces.iter().filter(move |interface| interface.role == role);
    of(Role::Uplink).chain(of(Role::Workload))
}
