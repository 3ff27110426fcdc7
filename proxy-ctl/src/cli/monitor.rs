//! The command `monitor`, which prints a line for each event until it is ended.

use std::{
    io::{self, BufWriter, Write},
    net::SocketAddr,
    os::fd::AsFd as _,
    path::Path,
    time::{Instant, SystemTime},
};

use anyhow::{Context as _, bail};
use jiff::{Timestamp, tz::TimeZone};
use nix::{
    errno::Errno,
    poll::{PollFd, PollFlags, PollTimeout, poll},
    sys::{
        signal::{SigSet, Signal},
        signalfd::{SfdFlags, SignalFd},
    },
    unistd::geteuid,
};
use proxy_common::{event::EventKind, reason::Reason};
use serde::Serialize;

use super::{
    args::{MonitorArgs, Output},
    flows::{FlowServiceView, is_in, is_of},
    show, table,
};
use crate::modes::{EventQuery, EventSnapshot};

/// The longest wait for events, in milliseconds. The events must be read at least this often, or
/// the programs stop making them.
const WAIT: u16 = 500;
/// The time between two reads of events that keep coming, in milliseconds. A wake-up for each event
/// costs far more than the event itself.
const GATHER: u16 = 10;

/// The message that is printed when the watch has begun. From then on no event is missed.
const WATCHING: &str = "watching; Ctrl-C ends it";

#[derive(Debug, Serialize)]
struct EventView<'a> {
    time: String,
    kind: &'static str,
    reason: &'static str,
    by: &'static str,
    service: Option<FlowServiceView<'a>>,
    protocol: &'static str,
    client: Option<SocketAddr>,
    frontend: SocketAddr,
    backend: Option<SocketAddr>,
}

impl<'a> EventView<'a> {
    fn new(event: &'a EventSnapshot) -> Self {
        Self {
            time: timestamp(event.time).to_string(),
            kind: event.kind.name(),
            reason: event.reason.name(),
            by: if event.of_socket { "socket" } else { "packet" },
            service: event.service.as_deref().map(FlowServiceView::new),
            protocol: event.protocol.name(),
            client: event.client,
            frontend: event.frontend,
            backend: event.backend,
        }
    }
}

pub(super) fn monitor(args: &MonitorArgs, bpffs: &Path) -> anyhow::Result<()> {
    if !geteuid().is_root() {
        bail!("`proxy-ctl monitor` must be run as root, because it makes the kernel programs report events");
    }
    let Some((mode, programmed)) = show::programmed(bpffs)? else {
        bail!("nothing is programmed on this node; `proxy-ctl status` tells more");
    };
    let reasons = if args.reason.is_empty() { Reason::ALL.to_vec() } else { args.reason.clone() };
    let Some(mut events) = programmed.watch(EventQuery { reasons, one_of: args.sample })? else {
        bail!("there are no events in mode {}: only the programs of mode ebpf make any", mode.name());
    };
    if let Some(wanted) = &args.service {
        show::ensure_served(wanted, &show::snapshot(bpffs)?.unwrap_or_default().services)?;
    }
    let ends: SigSet = [Signal::SIGINT, Signal::SIGTERM].into_iter().collect();
    ends.thread_block().context("blocking SIGINT and SIGTERM")?;
    let signals =
        SignalFd::with_flags(&ends, SfdFlags::SFD_CLOEXEC).context("making a descriptor of signals")?;
    // A closed stderr cannot be reported.
    let _ = writeln!(io::stderr(), "{WATCHING}");
    let mut out = BufWriter::with_capacity(1 << 16, io::stdout().lock());
    let mut shown = 0;
    let ended = 'watch: loop {
        let started = Instant::now();
        let width = table::width().map(usize::from);
        for event in events.read()?.iter().filter(|event| is_wanted(args, event)) {
            if args.count.is_some_and(|count| shown >= count) {
                break;
            }
            if let Err(error) = write_event(&mut out, args.output.output, event, width) {
                break 'watch Err(error);
            }
            shown += 1;
        }
        if let Err(error) = out.flush() {
            break Err(error);
        }
        if args.count.is_some_and(|count| shown >= count) {
            break Ok(());
        }
        let wait_for = |fd| PollFd::new(fd, PollFlags::POLLIN);
        if ends_within(WAIT, &mut [wait_for(signals.as_fd()), wait_for(events.as_fd())])? {
            break Ok(());
        }
        let spent = u16::try_from(started.elapsed().as_millis()).unwrap_or(u16::MAX);
        if ends_within(GATHER.saturating_sub(spent), &mut [wait_for(signals.as_fd())])? {
            break Ok(());
        }
    };
    let lost = events.lost()?;
    if lost > 0 {
        // A closed stderr cannot be reported.
        let _ = writeln!(
            io::stderr(),
            "{lost} events were lost, because they came faster than they were read; --sample or --reason makes them fewer"
        );
    }
    match ended {
        // A reader that has gone away is no error.
        Err(error) if error.kind() == io::ErrorKind::BrokenPipe => Ok(()),
        done => Ok(done?),
    }
}

/// Waits at most `millis` milliseconds until one of these descriptors is readable. Returns true if
/// the first one is, which receives SIGINT and SIGTERM.
fn ends_within(millis: u16, descriptors: &mut [PollFd<'_>]) -> anyhow::Result<bool> {
    match poll(descriptors, PollTimeout::from(millis)) {
        Ok(_) => Ok(descriptors.first().and_then(PollFd::any) == Some(true)),
        Err(Errno::EINTR) => Ok(false),
        Err(errno) => bail!("waiting for events: {errno}"),
    }
}

fn is_wanted(args: &MonitorArgs, event: &EventSnapshot) -> bool {
    let ends = [event.client, Some(event.frontend), event.backend];
    args.address.is_none_or(|range| ends.into_iter().any(|end| is_in(range, end)))
        && args.service.as_ref().is_none_or(|wanted| is_of(wanted, event.service.as_deref()))
}

fn write_event(
    out: &mut impl Write,
    format: Output,
    event: &EventSnapshot,
    width: Option<usize>,
) -> io::Result<()> {
    match format {
        Output::Table => writeln!(out, "{}", line(event, &TimeZone::system(), width)),
        Output::Json => {
            serde_json::to_writer(&mut *out, &EventView::new(event))?;
            writeln!(out)
        }
    }
}

fn timestamp(time: SystemTime) -> Timestamp {
    Timestamp::try_from(time).unwrap_or(Timestamp::UNIX_EPOCH)
}

/// The beginning of a line that continues an event.
const INDENT: &str = "    ";

/// Returns an event as text for people. It takes several lines if the terminal has no room for its
/// addresses.
fn line(event: &EventSnapshot, zone: &TimeZone, width: Option<usize>) -> String {
    let EventSnapshot { time, kind, reason, service, client, frontend, backend, protocol, .. } = event;
    let time = timestamp(*time).to_zoned(zone.clone());
    let head = format!(
        "{} {:<9} {:<18} {}",
        time.strftime("%H:%M:%S%.6f"),
        kind.name(),
        reason.name(),
        protocol.name()
    );
    let client = client.map_or_else(|| "a socket".to_owned(), |client| client.to_string());
    let (comma, to) = match (kind, backend) {
        (EventKind::Rebound, Some(backend)) => (",", Some(format!("no longer to {backend}"))),
        (_, Some(backend)) => ("", Some(format!("→ {backend}"))),
        (_, None) => ("", None),
    };
    let parts = [Some(client), Some(format!("→ {frontend}{comma}")), to];
    let service = service.as_ref().map(|service| format!(" {service}"));
    let mut column = head.chars().count();
    let mut text = head;
    for part in parts.into_iter().flatten().chain(service) {
        let length = part.chars().count();
        if width.is_some_and(|width| column + 1 + length > width) {
            text.push('\n');
            text.push_str(INDENT);
            text.push_str(part.trim_start());
            column = INDENT.len() + part.trim_start().chars().count();
        } else {
            text.push(' ');
            text.push_str(&part);
            column += 1 + length;
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use std::{sync::Arc, time::Duration};

    use clap::Parser as _;
    use rstest::rstest;

    use super::*;
    use crate::{
        cli::args::{Args, Command},
        model::{
            desired::ServicePortName,
            objects::{IpFamily, ObjectName, Protocol},
        },
    };

    fn opened() -> EventSnapshot {
        EventSnapshot {
            time: SystemTime::UNIX_EPOCH + Duration::from_micros(3_723_000_005),
            kind: EventKind::Opened,
            reason: Reason::FlowOpened,
            of_socket: false,
            service: Some(Arc::new(ServicePortName {
                service: ObjectName::new("default", "web"),
                port: "".into(),
                protocol: Protocol::Tcp,
                family: IpFamily::Ipv4,
            })),
            client: "10.244.1.7:40000".parse().ok(),
            frontend: "10.96.0.1:80".parse().unwrap(),
            backend: "10.244.2.3:8080".parse().ok(),
            protocol: Protocol::Tcp,
        }
    }

    fn refused() -> EventSnapshot {
        let (kind, reason) = (EventKind::Refused, Reason::NoEndpoints);
        EventSnapshot { kind, reason, of_socket: true, client: None, backend: None, ..opened() }
    }

    #[rstest]
    #[case::opened(
        opened(),
        "01:02:03.000005 opened    flow_opened        TCP 10.244.1.7:40000 → 10.96.0.1:80 → 10.244.2.3:8080  default/web"
    )]
    #[case::rebound(
        EventSnapshot { kind: EventKind::Rebound, reason: Reason::FlowReplaced, ..opened() },
        "01:02:03.000005 rebound   flow_replaced      TCP 10.244.1.7:40000 → 10.96.0.1:80, no longer to 10.244.2.3:8080  default/web"
    )]
    #[case::refused(
        refused(),
        "01:02:03.000005 refused   no_endpoints       TCP a socket → 10.96.0.1:80  default/web"
    )]
    fn an_event_for_people(#[case] event: EventSnapshot, #[case] expected: &str) {
        assert_eq!(line(&event, &TimeZone::UTC, None), expected);
    }

    #[rstest]
    #[case::wide(
        121,
        "01:02:03.000005 opened    flow_opened        TCP 10.244.1.7:40000 → 10.96.0.1:80 → 10.244.2.3:8080  default/web"
    )]
    #[case::of_100_columns(
        100,
        "01:02:03.000005 opened    flow_opened        TCP 10.244.1.7:40000 → 10.96.0.1:80 → 10.244.2.3:8080\n    default/web"
    )]
    #[case::of_80_columns(
        80,
        "01:02:03.000005 opened    flow_opened        TCP 10.244.1.7:40000 → 10.96.0.1:80\n    → 10.244.2.3:8080  default/web"
    )]
    fn an_event_fits_the_terminal(#[case] width: usize, #[case] expected: &str) {
        assert_eq!(line(&opened(), &TimeZone::UTC, Some(width)), expected);
    }

    #[test]
    fn an_event_for_programs() {
        assert_eq!(
            serde_json::to_value(EventView::new(&refused())).unwrap(),
            serde_json::json!({
                "time": "1970-01-01T01:02:03.000005Z", "kind": "refused", "reason": "no_endpoints", "by": "socket",
                "service": {"namespace": "default", "name": "web", "port": ""}, "protocol": "TCP",
                "client": null, "frontend": "10.96.0.1:80", "backend": null
            })
        );
    }

    fn args(flags: &[&str]) -> Result<MonitorArgs, String> {
        let line = ["proxy-ctl", "monitor"].iter().chain(flags);
        let args = Args::try_parse_from(line).map_err(|error| error.to_string())?;
        let Command::Monitor(args) = args.command else { panic!("another command") };
        Ok(args)
    }

    #[rstest]
    #[case::everything(&[], true)]
    #[case::its_service(&["--service", "web"], true)]
    #[case::another_service(&["--service", "other"], false)]
    #[case::its_client(&["--address", "10.244.1.0/24"], true)]
    #[case::its_frontend(&["--address", "10.96.0.1"], true)]
    #[case::its_backend(&["--address", "10.244.2.3"], true)]
    #[case::no_end_of_it(&["--address", "10.244.2.4"], false)]
    fn an_event_is_found_by(#[case] flags: &[&str], #[case] expected: bool) {
        assert_eq!(is_wanted(&args(flags).unwrap(), &opened()), expected);
    }

    #[test]
    fn reasons_are_named_as_status_names_them() {
        let found = args(&["--reason", "no_endpoints,flow_opened"]).unwrap();
        assert_eq!(found.reason, [Reason::NoEndpoints, Reason::FlowOpened]);
        let error = args(&["--reason", "malformed"]).unwrap_err();
        assert!(error.contains("possible values") && error.contains("no_endpoints"), "{error}");
    }
}
