//! The command `flows`. It reads the pinned maps, whether or not a controller runs.

use std::{
    io::{self, BufWriter, Write as _},
    net::SocketAddr,
    path::Path,
    time::Duration,
};

use ipnet::IpNet;
use serde::{Serialize, Serializer as _};

use super::{
    args::{FlowsArgs, Output},
    service_filter::ServiceFilter,
    show,
    table::{self, table},
};
use crate::{
    config::duration,
    model::{desired::ServicePortName, mode::Mode},
    modes::{FlowQuery, FlowSnapshot, FlowState},
};

const UNSEEN: &str =
    "Connections that socket hooks have sent to a backend have no flow, and are not listed.\n";

/// The name of a service port in JSON.
#[derive(Debug, Serialize)]
pub(super) struct FlowServiceView<'a> {
    namespace: &'a str,
    name: &'a str,
    port: &'a str,
}

impl<'a> FlowServiceView<'a> {
    pub(super) fn new(name: &'a ServicePortName) -> Self {
        Self { namespace: &name.service.namespace, name: &name.service.name, port: &name.port }
    }
}

#[derive(Debug, Serialize)]
struct FlowView<'a> {
    service: Option<FlowServiceView<'a>>,
    protocol: &'static str,
    client: Option<SocketAddr>,
    frontend: Option<SocketAddr>,
    backend: SocketAddr,
    masquerade: Option<SocketAddr>,
    dsr: bool,
    state: FlowState,
    /// The age in seconds. `idle` is in seconds too.
    age: u64,
    idle: u64,
}

impl<'a> FlowView<'a> {
    fn new(flow: &'a FlowSnapshot) -> Self {
        Self {
            service: flow.service.as_deref().map(FlowServiceView::new),
            protocol: flow.protocol.name(),
            client: flow.client,
            frontend: flow.frontend,
            backend: flow.backend,
            masquerade: flow.masquerade,
            dsr: flow.dsr,
            state: flow.state,
            age: flow.age.as_secs(),
            idle: flow.idle.as_secs(),
        }
    }
}

pub(super) fn flows(args: &FlowsArgs, bpffs: &Path) -> anyhow::Result<()> {
    let limit = if args.limit == 0 { usize::MAX } else { args.limit };
    let query = FlowQuery { wanted: &|flow| is_wanted(args, flow), limit };
    let programmed = show::programmed(bpffs)?;
    let flows = match &programmed {
        Some((_, programmed)) => programmed.flows(&query).map_err(show::explained)?,
        None => None,
    };
    if let Some(wanted) = &args.service
        && flows.as_ref().is_none_or(Vec::is_empty)
    {
        show::ensure_served(wanted, &show::snapshot(bpffs)?.unwrap_or_default().services)?;
    }
    match args.output.output {
        Output::Json => print_json(flows.unwrap_or_default().iter().map(FlowView::new)),
        Output::Table => {
            Ok(table::print(&in_words(flows.as_deref(), programmed.map(|(mode, _)| mode), args.limit))?)
        }
    }
}

/// Prints one object after the other, because the whole text of half a million flows would take
/// more memory than the flows.
fn print_json<'a>(flows: impl Iterator<Item = FlowView<'a>>) -> anyhow::Result<()> {
    let mut out = BufWriter::new(io::stdout().lock());
    let written = serde_json::Serializer::pretty(&mut out).collect_seq(flows).map_err(io::Error::from);
    match written.and_then(|()| writeln!(out)).and_then(|()| out.flush()) {
        // A reader that has gone away is no error.
        Err(error) if error.kind() == io::ErrorKind::BrokenPipe => Ok(()),
        done => Ok(done?),
    }
}

fn is_wanted(args: &FlowsArgs, flow: &FlowSnapshot) -> bool {
    let has_state =
        if args.state.is_empty() { flow.state != FlowState::Ended } else { args.state.contains(&flow.state) };
    has_state
        && args.protocol.is_none_or(|protocol| protocol == flow.protocol)
        && args.client.is_none_or(|range| is_in(range, flow.client))
        && args.backend.is_none_or(|range| is_in(range, Some(flow.backend)))
        && args.service.as_ref().is_none_or(|wanted| is_of(wanted, flow.service.as_deref()))
}

pub(super) fn is_in(range: IpNet, end: Option<SocketAddr>) -> bool {
    end.is_some_and(|end| range.contains(&end.ip()))
}

pub(super) fn is_of(wanted: &ServiceFilter, service: Option<&ServicePortName>) -> bool {
    service.is_some_and(|name| wanted.matches(&name.service.namespace, &name.service.name, &name.port))
}

/// Returns the flows as text. `flows` is `None` if the mode keeps no flows.
fn in_words(flows: Option<&[FlowSnapshot]>, mode: Option<Mode>, limit: usize) -> String {
    match (flows, mode) {
        (_, None) => {
            "Nothing is programmed on this node, so there are no flows; `proxy-ctl status` tells more.\n"
                .to_owned()
        }
        (None, Some(mode)) => format!(
            "There are no flows in mode {}: only the packet programs of mode ebpf keep any. `conntrack -L` \
             lists what netfilter translates, and `proxy-ctl services` shows what is served.\n",
            mode.name()
        ),
        (Some([]), Some(_)) => format!("There is no such flow. {UNSEEN}"),
        (Some(flows), Some(_)) => {
            let rows: Vec<_> = flows.iter().map(row).collect();
            let mut text = if table::fits(COLUMNS, &rows) {
                table(COLUMNS, rows)
            } else {
                table(NARROW_COLUMNS, rows.into_iter().map(narrow_row))
            };
            if flows.len() == limit {
                text.push_str(&format!("These are the newest {limit} flows; --limit sets the number.\n"));
            }
            text.push_str(UNSEEN);
            text
        }
    }
}

const COLUMNS: [&str; 8] = ["SERVICE", "PROTOCOL", "CLIENT", "FRONTEND", "BACKEND", "STATE", "AGE", "IDLE"];

/// The columns for terminals that have no room for three addresses side by side.
const NARROW_COLUMNS: [&str; 6] =
    ["SERVICE", "PROTOCOL", "CLIENT, FRONTEND, BACKEND", "STATE", "AGE", "IDLE"];

/// Puts the addresses of a flow below each other.
fn narrow_row([service, protocol, client, frontend, backend, state, age, idle]: [String; 8]) -> [String; 6] {
    [service, protocol, format!("{client}\n{frontend}\n{backend}"), state, age, idle]
}

fn row(flow: &FlowSnapshot) -> [String; 8] {
    let or_dash = |end: Option<SocketAddr>| end.map_or_else(|| "-".to_owned(), |end| end.to_string());
    let backend = match (flow.masquerade, flow.dsr) {
        (Some(masquerade), _) => format!("{}\nvia {masquerade}", flow.backend),
        (None, true) => format!("{}\nanswers directly", flow.backend),
        (None, false) => flow.backend.to_string(),
    };
    let whole_seconds = |time: Duration| duration::format(Duration::from_secs(time.as_secs()));
    [
        flow.service.as_ref().map_or_else(|| "-".to_owned(), |name| name.to_string()),
        flow.protocol.name().to_owned(),
        or_dash(flow.client),
        or_dash(flow.frontend),
        backend,
        state_name(flow.state),
        whole_seconds(flow.age),
        whole_seconds(flow.idle),
    ]
}

/// Returns the name of a state as the flag takes it.
fn state_name(state: FlowState) -> String {
    use clap::ValueEnum as _;
    state.to_possible_value().map(|value| value.get_name().to_owned()).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use clap::Parser as _;
    use rstest::rstest;

    use super::*;
    use crate::{
        cli::args::{Args, Command},
        model::objects::{IpFamily, ObjectName, Protocol},
    };

    fn web() -> FlowSnapshot {
        let name = ServicePortName {
            service: ObjectName::new("default", "web"),
            port: "http".into(),
            protocol: Protocol::Tcp,
            family: IpFamily::Ipv4,
        };
        FlowSnapshot {
            service: Some(Arc::new(name)),
            client: "10.244.1.7:40000".parse().ok(),
            frontend: "10.96.0.1:80".parse().ok(),
            backend: "10.244.2.3:8080".parse().unwrap(),
            masquerade: None,
            dsr: false,
            protocol: Protocol::Tcp,
            state: FlowState::Established,
            age: Duration::from_millis(61_900),
            idle: Duration::from_secs(1),
        }
    }

    fn args(flags: &[&str]) -> FlowsArgs {
        let line = ["proxy-ctl", "flows"].iter().chain(flags);
        let Command::Flows(args) = Args::try_parse_from(line).unwrap().command else {
            panic!("another command")
        };
        args
    }

    #[rstest]
    #[case::everything(&[], true)]
    #[case::its_service(&["--service", "default/web"], true)]
    #[case::its_service_port(&["--service", "web:http"], true)]
    #[case::another_port(&["--service", "default/web:https"], false)]
    #[case::its_client(&["--client", "10.244.1.7"], true)]
    #[case::its_clients_range(&["--client", "10.244.1.0/24"], true)]
    #[case::another_client(&["--client", "10.244.1.8"], false)]
    #[case::its_backend(&["--backend", "10.244.2.0/24"], true)]
    #[case::another_backend(&["--backend", "10.244.2.4"], false)]
    #[case::its_protocol(&["--protocol", "tcp"], true)]
    #[case::another_protocol(&["--protocol", "UDP"], false)]
    #[case::its_state(&["--state", "opening,established"], true)]
    #[case::another_state(&["--state", "opening"], false)]
    fn a_flow_is_found_by(#[case] flags: &[&str], #[case] expected: bool) {
        assert_eq!(is_wanted(&args(flags), &web()), expected);
    }

    #[test]
    fn flows_that_have_ended_are_listed_where_they_are_asked_for() {
        let ended = FlowSnapshot { state: FlowState::Ended, ..web() };
        assert!(!is_wanted(&args(&[]), &ended));
        assert!(is_wanted(&args(&["--state", "ended"]), &ended));
    }

    #[test]
    fn flows_for_people() {
        let masqueraded = FlowSnapshot { masquerade: "172.18.0.2:1024".parse().ok(), ..web() };
        let dsr = FlowSnapshot { dsr: true, ..web() };
        let text = in_words(Some(&[web(), masqueraded, dsr]), Some(Mode::Ebpf), 1_000);
        let lines: Vec<Vec<&str>> = text.lines().map(|line| line.split_whitespace().collect()).collect();
        assert_eq!(
            lines[0],
            ["SERVICE", "PROTOCOL", "CLIENT", "FRONTEND", "BACKEND", "STATE", "AGE", "IDLE"]
        );
        let row = [
            "default/web:http",
            "TCP",
            "10.244.1.7:40000",
            "10.96.0.1:80",
            "10.244.2.3:8080",
            "established",
            "1m1s",
            "1s",
        ];
        assert_eq!((lines[1].as_slice(), lines[2].as_slice()), (&row[..], &row[..]));
        assert_eq!(lines[3], ["via", "172.18.0.2:1024"]);
        assert_eq!(lines[5], ["answers", "directly"]);
        assert!(text.ends_with(UNSEEN) && !text.contains("--limit"), "{text}");
        assert!(in_words(Some(&[web()]), Some(Mode::Ebpf), 1).contains("These are the newest 1 flows;"));
    }

    #[test]
    fn addresses_of_a_flow_stand_below_each_other_where_there_is_no_room() {
        let addresses = &narrow_row(row(&web()))[2];
        assert_eq!(addresses, "10.244.1.7:40000\n10.96.0.1:80\n10.244.2.3:8080");
    }

    #[test]
    fn a_flow_for_programs() {
        let flow = FlowSnapshot { frontend: None, service: None, ..web() };
        assert_eq!(
            serde_json::to_value(FlowView::new(&flow)).unwrap(),
            serde_json::json!({
                "service": null, "protocol": "TCP", "client": "10.244.1.7:40000", "frontend": null,
                "backend": "10.244.2.3:8080", "masquerade": null, "dsr": false, "state": "established", "age": 61, "idle": 1
            })
        );
        assert_eq!(serde_json::to_value(FlowView::new(&web())).unwrap()["service"]["port"], "http");
    }

    #[test]
    fn other_modes_say_who_keeps_connections() {
        assert!(in_words(None, Some(Mode::Nftables), 1).contains("no flows in mode nftables"));
        assert!(in_words(None, None, 1).contains("proxy-ctl status"));
        assert!(in_words(Some(&[]), Some(Mode::Ebpf), 1).contains("no such flow"));
    }
}
