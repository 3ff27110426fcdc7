//! State that proxies program in a node's kernel, as lines. Two states can be compared, and each
//! line that differs says what it is.
//!
//! The state leaves out counters, handles, what a rule has matched, and the empty base chains that
//! iptables leaves wherever it was used. Kernel parameters are kept apart: a mode leaves those that
//! it has set, as kube-proxy does.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    os::unix::fs::PermissionsExt as _,
    path::Path,
    process::{Command, Stdio},
};

use anyhow::{Context as _, Result, bail};
use aya::programs::{ProgramInfo, SchedClassifier, TcAttachType};
use lab::{Lab, address::NodeNumber, cluster::node_name, namespace::within};
use serde_json::{Value, json};

/// Beginning of the line of a table that only keeps established connections translated.
pub const HOLDER: &str = "holder ";

#[derive(Clone, Debug, Default, Eq, PartialEq)]
pub struct State(BTreeSet<String>);

/// Writable parameters below /proc/sys/net, with their values.
pub type Parameters = BTreeMap<String, String>;

impl State {
    /// Reads the state of a node. Needs nft, iptables, ip, tc and bpftool, and also ipset and
    /// ipvsadm if the kernel has them.
    pub fn read(lab: &Lab, node: NodeNumber) -> Result<Self> {
        let netns = lab.netns(&node_name(node))?;
        let mut lines = within(&netns.namespace, || {
            let mut lines = nftables()?;
            for save in ["iptables-legacy-save", "ip6tables-legacy-save"] {
                lines.extend(legacy(save)?);
            }
            lines.extend(ipsets()?);
            lines.extend(of_lines("ip", &["-o", "address"], address)?);
            lines.extend(of_lines("ip", &["-o", "link"], link)?);
            lines.extend(of_lines("ip", &["rule"], |line| Some(format!("rule {line}")))?);
            lines.extend(virtual_servers()?);
            lines.extend(packet_programs()?);
            Ok(lines)
        })?;
        lines.extend(programs_of_cgroup(&netns.cgroup)?);
        lines.extend(files(&lab.bpffs(node), "bpffs "));
        Ok(Self(lines))
    }

    /// Returns what this state has and the other does not.
    pub fn left(&self, before: &Self) -> Vec<String> {
        self.0.difference(&before.0).map(|line| format!("left: {line}")).collect()
    }

    /// Returns what one of the states has and the other does not. If the list is empty, they are
    /// the same.
    pub fn differences(&self, expected: &Self) -> Vec<String> {
        let missing = expected.0.difference(&self.0).map(|line| format!("missing: {line}"));
        self.left(expected).into_iter().chain(missing).collect()
    }
}

/// Makes netfilter on a node forget all connections. Needs conntrack.
pub fn forget_connections(lab: &Lab, node: NodeNumber) -> Result<()> {
    within(&lab.netns(&node_name(node))?.namespace, || output("conntrack", &["-F"]).map(drop))
}

/// Makes connection tracking follow connections of a node even if no proxy asks for it, or ends
/// that.
pub fn track_connections(lab: &Lab, node: NodeNumber, is_on: bool) -> Result<()> {
    let chains = "chain out { type filter hook output priority 0; ct state new; }
        chain in { type filter hook prerouting priority 0; ct state new; }";
    with_table(lab, &node_name(node), "tracking", is_on.then_some(chains))
}

/// Makes a node drop every RST before connection tracking sees it, or ends that.
pub fn lose_resets(lab: &Lab, node: NodeNumber, is_on: bool) -> Result<()> {
    let chains = "chain out { type filter hook output priority -500; tcp flags rst drop; }
        chain in { type filter hook prerouting priority -500; tcp flags rst drop; }";
    with_table(lab, &node_name(node), "lossy", is_on.then_some(chains))
}

/// Has a server lose every fourth answer to a SYN, so that the client sends its SYN again after a
/// second, or no longer.
pub fn lose_answers_to_syns(lab: &Lab, server: &str, is_on: bool) -> Result<()> {
    let chain = "chain out { type filter hook output priority 0;
        tcp flags & (syn | ack) == (syn | ack) numgen random mod 4 == 0 drop; }";
    with_table(lab, server, "lossy", is_on.then_some(chain))
}

/// Ends sockets of a node that no process has any more, as the kernel does after a minute. Needs ss
/// of iproute2 with `-K`.
pub fn end_orphans(lab: &Lab, node: NodeNumber) -> Result<()> {
    const STATES: &str = "state fin-wait-1 state fin-wait-2 state last-ack state closing";
    let arguments: Vec<&str> = ["-K", "-t"].into_iter().chain(STATES.split(' ')).collect();
    within(&lab.netns(&node_name(node))?.namespace, || output("ss", &arguments).map(drop))
}

/// Adds an nftables table with these chains to a node or a pod, or removes it.
fn with_table(lab: &Lab, namespace: &str, name: &str, chains: Option<&str>) -> Result<()> {
    let commands = match chains {
        Some(chains) => format!("table inet {name} {{\n{chains}\n}}"),
        None => format!("delete table inet {name}"),
    };
    within(&lab.netns(namespace)?.namespace, || output("nft", &[&commands]).map(drop))
}

/// Returns the TCP connections that a node knows and nobody has answered, as the tool conntrack
/// lists them.
pub fn unanswered_connections(lab: &Lab, node: NodeNumber) -> Result<String> {
    within(&lab.netns(&node_name(node))?.namespace, || {
        let list = |family| output("conntrack", &["-L", "-f", family, "-p", "tcp", "--state", "SYN_SENT"]);
        Ok(list("ipv4")? + &list("ipv6")?)
    })
}

/// Returns all TCP connections that a node knows, as the tool conntrack lists them.
pub fn connections(lab: &Lab, node: NodeNumber) -> Result<String> {
    within(&lab.netns(&node_name(node))?.namespace, || {
        let list = |family| output("conntrack", &["-L", "-f", family, "-p", "tcp"]);
        Ok(list("ipv4")? + &list("ipv6")?)
    })
}

/// Returns the parameters of the node's network namespace.
pub fn parameters(lab: &Lab, node: NodeNumber) -> Result<Parameters> {
    within(&lab.netns(&node_name(node))?.namespace, || {
        let mut found = Parameters::new();
        read_parameters(Path::new("/proc/sys/net"), &mut found);
        Ok(found)
    })
}

/// Adds the parameters of a folder. Those that cannot be read are left out; some, like `flush`, can
/// only be written.
fn read_parameters(folder: &Path, found: &mut Parameters) {
    for entry in fs::read_dir(folder).into_iter().flatten().flatten() {
        let path = entry.path();
        let Ok(metadata) = entry.metadata() else { continue };
        if metadata.is_dir() {
            read_parameters(&path, found);
        } else if metadata.permissions().mode() & 0o200 != 0
            && let Ok(value) = fs::read_to_string(&path)
        {
            let name = path.strip_prefix("/proc/sys").unwrap_or(&path).display().to_string();
            found.insert(name, value.trim().to_owned());
        }
    }
}

fn output(program: &str, arguments: &[&str]) -> Result<String> {
    let mut command = Command::new(program);
    let output = command.args(arguments).stdin(Stdio::null()).output();
    let output = output.with_context(|| format!("starting {program}"))?;
    if !output.status.success() {
        bail!("{program} {}: {}", arguments.join(" "), String::from_utf8_lossy(&output.stderr));
    }
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}

fn of_lines(
    program: &str,
    arguments: &[&str],
    told: impl Fn(&str) -> Option<String>,
) -> Result<BTreeSet<String>> {
    Ok(output(program, arguments)?.lines().filter_map(told).collect())
}

fn nftables() -> Result<BTreeSet<String>> {
    let text = output("nft", &["-j", "-s", "list", "ruleset"])?;
    let mut ruleset: Value = serde_json::from_str(&text).context("reading what nft lists")?;
    let mut objects: Vec<Value> = match ruleset.get_mut("nftables").map(Value::take) {
        Some(Value::Array(objects)) => objects,
        _ => bail!("nft lists no ruleset"),
    };
    objects.retain(|object| !is_shared(&object.to_string()));
    name_drawn_endpoints(&mut objects);
    number_listeners(&mut objects);
    let holders = holders(&mut objects);
    let with_rules: BTreeSet<_> =
        objects.iter().filter(|object| object.get("rule").is_some()).map(table).collect();
    let chain_of = |rule: &Value| Some((table(rule)?, rule.pointer("/rule/chain")?.as_str()?.to_owned()));
    let used: BTreeSet<_> = objects.iter().filter_map(chain_of).collect();
    // kube-proxy deletes chains some time after their rules, so empty chains do not count.
    let is_empty_chain = |object: &Value| {
        let name = object.pointer("/chain/name").and_then(Value::as_str);
        name.zip(table(object)).is_some_and(|(name, table)| !used.contains(&(table, name.to_owned())))
    };
    let counts = |object: &&Value| {
        object.get("metainfo").is_none() && with_rules.contains(&table(object)) && !is_empty_chain(object)
    };
    let told = |object: &Value| {
        let mut object = object.clone();
        without_handles(&mut object);
        format!("nft {object}")
    };
    Ok(objects.iter().filter(counts).map(told).chain(holders).collect())
}

/// Returns family and name of the table that a chain, a rule or a map is in, or that the object is.
fn table(object: &Value) -> Option<(String, String)> {
    let object = object.as_object()?.values().next()?;
    let named = object.get("table").or_else(|| object.get("name"))?;
    Some((object.get("family")?.as_str()?.to_owned(), named.as_str()?.to_owned()))
}

/// Takes out the rules that only keep established connections translated. A table without other
/// rules is not listed.
fn holders(objects: &mut Vec<Value>) -> BTreeSet<String> {
    let is_holder = |object: &Value| {
        let comment = object.pointer("/rule/comment").and_then(Value::as_str);
        comment == Some("keeps connections translated")
    };
    let (holders, others): (Vec<_>, Vec<_>) = std::mem::take(objects).into_iter().partition(is_holder);
    *objects = others;
    holders.iter().filter_map(table).map(|(family, name)| format!("{HOLDER}{family} {name}")).collect()
}

/// Replaces the slots of a map by its endpoints. Which slots mode nftables gives to a service port
/// depends on what it has served before.
fn name_drawn_endpoints(objects: &mut [Value]) {
    let mut slots: BTreeMap<(String, String), BTreeMap<u64, Value>> = BTreeMap::new();
    for map in objects.iter_mut().filter_map(|object| object.get_mut("map")) {
        let word = |field: &str| map.get(field).and_then(Value::as_str).unwrap_or_default().to_owned();
        let of_map = (word("family"), format!("@{}", word("name")));
        if !of_map.1.starts_with("@endpoints-") {
            continue;
        }
        let Some(Value::Array(elements)) = map.get_mut("elem").map(Value::take) else { continue };
        let slot = |element: &Value| {
            let key = element.get(0)?;
            key.as_u64().or_else(|| key.pointer("/elem/val")?.as_u64())
        };
        let by_slot = elements.iter().filter_map(|element| Some((slot(element)?, element.get(1)?.clone())));
        slots.insert(of_map, by_slot.collect());
    }
    for rule in objects.iter_mut().filter_map(|object| object.get_mut("rule")) {
        let family = rule.get("family").and_then(Value::as_str).unwrap_or_default().to_owned();
        let drawn = |map: &Value| {
            let word = |at: &str| map.pointer(at).and_then(Value::as_u64);
            let (first, count) = (word("/key/numgen/offset")?, word("/key/numgen/mod")?);
            let slots = slots.get(&(family.clone(), map.get("data")?.as_str()?.to_owned()))?;
            Some(slots.range(first..first + count).map(|(_, endpoint)| endpoint.clone()).collect::<Value>())
        };
        replace_maps(rule, &drawn);
    }
}

fn replace_maps(value: &mut Value, with: &impl Fn(&Value) -> Option<Value>) {
    match value {
        Value::Object(fields) => {
            if let Some(map) = fields.get_mut("map")
                && let Some(told) = with(map)
            {
                *map = told;
            }
            fields.values_mut().for_each(|field| replace_maps(field, with));
        }
        Value::Array(values) => values.iter_mut().for_each(|value| replace_maps(value, with)),
        Value::Null | Value::Bool(_) | Value::Number(_) | Value::String(_) => {}
    }
}

/// Numbers the listeners of mode userspace, whose ports are random, in the order of the rules that
/// redirect to them.
fn number_listeners(objects: &mut [Value]) {
    let of_userspace =
        |object: &&mut Value| table(object).is_some_and(|(_, name)| name == "proxy-ctl-userspace");
    let mut elements: Vec<([String; 3], &mut Value)> = Vec::new();
    for map in objects.iter_mut().filter(of_userspace) {
        let family = table(map).map(|(family, _)| family).unwrap_or_default();
        let Some(Value::Array(pairs)) = map.pointer_mut("/map/elem") else { continue };
        elements.extend(pairs.iter_mut().filter_map(|pair| {
            let [key, port] = pair.as_array_mut()?.as_mut_slice() else { return None };
            let key = key.to_string();
            let protocol = if key.contains("\"tcp\"") { "tcp" } else { "udp" };
            Some(([family.clone(), protocol.to_owned(), key], port))
        }));
    }
    elements.sort_by(|(a, _), (b, _)| a.cmp(b));
    let mut numbers: BTreeMap<[String; 3], usize> = BTreeMap::new();
    for ([family, protocol, _], port) in elements {
        let next = numbers.len();
        // Each protocol of each family has its own ports.
        let number = numbers.entry([family, protocol, port.to_string()]).or_insert(next);
        *port = json!(format!("listener {number}"));
    }
}

/// Returns true for a chain that the kubelet has too. kube-proxy's own cleanup leaves it.
fn is_shared(line: &str) -> bool {
    line.contains("KUBE-FIREWALL")
}

/// Removes handles, which change with each write, and sorts what has no order. nft lists elements
/// in any order, and the matches of a rule that another writer has made may stand in another order.
fn without_handles(value: &mut Value) {
    match value {
        Value::Object(fields) => {
            fields.remove("handle");
            fields.remove("index");
            for unordered in ["elem", "expr"] {
                if let Some(Value::Array(values)) = fields.get_mut(unordered) {
                    values.sort_by_key(Value::to_string);
                }
            }
            fields.values_mut().for_each(without_handles);
        }
        Value::Array(values) => values.iter_mut().for_each(without_handles),
        Value::Null | Value::Bool(_) | Value::Number(_) | Value::String(_) => {}
    }
}

/// Returns the rules and users' chains of each table.
fn legacy(save: &str) -> Result<BTreeSet<String>> {
    let mut table = String::new();
    let mut lines = BTreeSet::new();
    for line in output(save, &[])?.lines().filter(|line| !is_shared(line)) {
        if let Some(name) = line.strip_prefix('*') {
            name.clone_into(&mut table);
        } else if line.starts_with("-A ") {
            lines.insert(format!("{save} {table} {line}"));
        } else if let Some((chain, _)) = line.strip_prefix(':').and_then(|rest| rest.split_once(" - [")) {
            lines.insert(format!("{save} {table} chain {chain}"));
        }
    }
    Ok(lines)
}

fn ipsets() -> Result<BTreeSet<String>> {
    // This folder exists too if ipset is built into the kernel.
    if !Path::new("/sys/module/ip_set").exists() {
        return Ok(BTreeSet::new());
    }
    // The kernel shows its default `bucketsize 12` only if the program that made the set asked for
    // it, so this differs between programs. The seed of the hash (`initval`) differs each time.
    of_lines("ipset", &["save"], |line| {
        let mut kept = vec!["ipset"];
        let mut words = line.split(' ');
        while let Some(word) = words.next() {
            match word {
                "initval" | "bucketsize" => drop(words.next()),
                _ => kept.push(word),
            }
        }
        Some(kept.join(" "))
    })
}

fn address(line: &str) -> Option<String> {
    let mut words = line.split_whitespace().skip(1);
    let (device, family, address) = (words.next()?, words.next()?, words.next()?);
    Some(format!("address {device} {family} {address}"))
}

fn link(line: &str) -> Option<String> {
    let device = line.split(": ").nth(1)?;
    Some(format!("link {device}"))
}

/// Returns the name of a device without its peer.
fn device(line: &str) -> Option<String> {
    let device = line.split(": ").nth(1)?;
    Some(device.split('@').next().unwrap_or(device).to_owned())
}

/// Returns the virtual servers of IPVS in this network namespace, if the kernel has IPVS. They are
/// read by netlink, because /proc/net/ip_vs leaves out some in each page after the first. It counts
/// those of other namespaces too (Linux 6.1).
fn virtual_servers() -> Result<BTreeSet<String>> {
    if !Path::new("/proc/thread-self/net/ip_vs").exists() {
        return Ok(BTreeSet::new());
    }
    Ok(servers_and_destinations(&output("ipvsadm", &["--list", "--numeric"])?))
}

/// Returns servers and destinations without their numbers of connections. A destination that takes
/// no new connections is left out while it has old ones.
fn servers_and_destinations(text: &str) -> BTreeSet<String> {
    let mut lines = BTreeSet::new();
    let mut server = String::new();
    for line in text.lines() {
        let words: Vec<&str> = line.split_whitespace().collect();
        match words[..] {
            ["TCP" | "UDP" | "SCTP" | "FWM", ..] => {
                server = format!("ipvs {}", words[..words.len().min(4)].join(" "));
                lines.insert(server.clone());
            }
            ["->", _, _, "0", active, inactive] if (active, inactive) != ("0", "0") => {}
            ["->", address, _, weight, ..] if !server.is_empty() => {
                lines.insert(format!("{server} to {address} weight {weight}"));
            }
            _ => {}
        }
    }
    lines
}

/// Returns the programs on every device, at tcx and as filters of a clsact qdisc.
fn packet_programs() -> Result<BTreeSet<String>> {
    let mut lines = BTreeSet::new();
    for device in of_lines("ip", &["-o", "link"], device)? {
        for (attach_type, word) in [(TcAttachType::Ingress, "ingress"), (TcAttachType::Egress, "egress")] {
            // A kernel before 6.6 has no tcx.
            let (_, programs) = SchedClassifier::query_tcx(&device, attach_type).unwrap_or_default();
            let told = |program: &ProgramInfo| {
                format!("tcx {device} {word} {}", program.name_as_str().unwrap_or_default())
            };
            lines.extend(programs.iter().map(told));
            let filters = of_lines("tc", &["filter", "show", "dev", &device, word], |line| {
                // The rest of the line is the program's identity, which differs each time.
                let told = line.split(" id ").next().unwrap_or(line);
                Some(format!("tc {device} {word} {told}"))
            });
            lines.extend(filters?);
        }
    }
    Ok(lines)
}

fn programs_of_cgroup(cgroup: &Path) -> Result<BTreeSet<String>> {
    let text = output("bpftool", &["-j", "cgroup", "show", &cgroup.display().to_string()])?;
    if text.trim().is_empty() {
        return Ok(BTreeSet::new());
    }
    let programs: Vec<Value> = serde_json::from_str(&text).context("reading what bpftool lists")?;
    let word = |program: &Value, field: &str| {
        program.get(field).and_then(Value::as_str).unwrap_or_default().to_owned()
    };
    let told = |program: &Value| format!("cgroup {} {}", word(program, "attach_type"), word(program, "name"));
    Ok(programs.iter().map(told).collect())
}

fn files(folder: &Path, prefix: &str) -> BTreeSet<String> {
    let mut names = BTreeSet::new();
    for found in fs::read_dir(folder).into_iter().flatten().flatten() {
        let name = format!("{prefix}/{}", found.file_name().to_string_lossy());
        if found.path().is_dir() {
            names.extend(files(&found.path(), &name));
        } else {
            names.insert(name);
        }
    }
    names
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Output of ipvsadm: a destination, and the beginning of the line of another, whose weight and
    /// connections follow.
    const SERVED: &str = "IP Virtual Server version 1.2.1 (size=4096)
Prot LocalAddress:Port Scheduler Flags
  -> RemoteAddress:Port Forward Weight ActiveConn InActConn
TCP  10.96.0.1:80 rr persistent 600
  -> 10.0.0.2:8080        Masq    1      3          2
  -> 10.0.0.1:8080        Masq    ";
    const SERVER: &str = "ipvs TCP 10.96.0.1:80 rr persistent";

    #[test]
    fn destinations_are_there_with_their_weight_unless_they_drain() {
        for (line, weight) in [
            ("1      7          0", Some("1")),
            ("1      0          0", Some("1")),
            ("5      0          0", Some("5")),
            ("0      0          4", None),
            // Nobody will remove this destination, because it has no connections.
            ("0      0          0", Some("0")),
        ] {
            let first = weight.map(|weight| format!("{SERVER} to 10.0.0.1:8080 weight {weight}"));
            let others = [SERVER.to_owned(), format!("{SERVER} to 10.0.0.2:8080 weight 1")];
            let expected: BTreeSet<String> = first.into_iter().chain(others).collect();
            assert_eq!(servers_and_destinations(&format!("{SERVED}{line}\n")), expected, "{line}");
        }
    }
}
