//! XDP on uplinks.

use super::*;

#[test]
fn xdp_is_on_the_uplinks_that_can_have_it() {
    let Some(sandbox) = Sandbox::new() else { return };
    let (uplink, workload) = (card("dpa"), veth("dpb"));
    // The driver of this device has no XDP.
    run("ip", "link add dpc type bridge");
    let bridge = index("dpc");
    let host = host(&[("dpa", Role::Uplink), ("dpb", Role::Workload), ("dpc", Role::Uplink)]);
    let of_tc = || &(&named(uplink) | &named(workload)) | &named(bridge);
    let with = |hooks: &[String]| &of_tc() | &hooks.iter().cloned().collect();
    let open = |xdp| {
        let mut dataplane = EbpfDataplane::open(&Ebpf { xdp, ..sandbox.config.clone() }).unwrap();
        dataplane.take_host(&host).unwrap();
        dataplane
    };

    let dataplane = open(Xdp::Native);
    let native = format!("{uplink}_native");
    assert_eq!(links(&sandbox), with(std::slice::from_ref(&native)));
    let link = format!("{uplink}_xdp_native");
    let before = program_of(&sandbox, &link);
    drop(dataplane);
    let dataplane = open(Xdp::Native);
    assert_eq!(links(&sandbox), with(&[native]));
    assert_ne!(program_of(&sandbox, &link), before, "a restart swaps the program");
    drop(dataplane);

    let dataplane = open(Xdp::Generic);
    assert_eq!(links(&sandbox), with(&[format!("{uplink}_generic"), format!("{bridge}_generic")]));
    drop(dataplane);
    // None of these devices is a network card.
    for xdp in [Xdp::Auto, Xdp::Off] {
        drop(open(xdp));
        assert_eq!(links(&sandbox), of_tc(), "{xdp:?}");
        assert!(!run("ip", "link show dpa").contains("xdp"));
    }

    drop(open(Xdp::Native));
    let removed = cleanup(&sandbox.config.bpffs).unwrap();
    assert!(removed.links.contains(&link), "{removed:?}");
    assert!(!run("ip", "link show dpa").contains("xdp"));
}

#[test]
fn xdp_waits_for_another_program_to_go() {
    let Some(sandbox) = Sandbox::new() else { return };
    let uplink = card("dpa");
    const XDP: u32 = 6;
    let other = bpf::load_program(XDP, bpf_attach_type::BPF_XDP as u32, &returns(2)).unwrap();
    let others_link = bpf::link_xdp(other.as_fd(), uplink, XdpMode::Native).unwrap();
    let mut dataplane = EbpfDataplane::open(&Ebpf { xdp: Xdp::Native, ..sandbox.config.clone() }).unwrap();
    dataplane.take_host(&host(&[("dpa", Role::Uplink)])).unwrap();
    assert_eq!(links(&sandbox), named(uplink));
    bpf::link_detach(others_link.as_fd()).unwrap();
    for _ in 0..COLLECTIONS_BETWEEN_INSPECTIONS {
        dataplane.collect_garbage().unwrap();
    }
    assert_eq!(links(&sandbox), &named(uplink) | &[format!("{uplink}_native")].into());
}

#[rstest]
#[case::here(false)]
#[case::in_another_namespace(true)]
fn xdp_is_not_on_a_veth_that_gets_unfinished_checksums(#[case] is_elsewhere: bool) {
    let Some(sandbox) = Sandbox::new() else { return };
    let uplink = veth("dpa");
    let elsewhere = format!("px-peer-{}", std::process::id());
    if is_elsewhere {
        run("ip", &format!("netns add {elsewhere}"));
        run("ip", &format!("link set dpap netns {elsewhere}"));
        run("ip", &format!("-n {elsewhere} link set dpap up"));
    }
    let complete = || match is_elsewhere {
        true => run("ip", &format!("netns exec {elsewhere} ethtool -K dpap tx off")),
        false => run("ethtool", "-K dpap tx off"),
    };
    let mut dataplane = EbpfDataplane::open(&Ebpf { xdp: Xdp::Native, ..sandbox.config.clone() }).unwrap();
    dataplane.take_host(&host(&[("dpa", Role::Uplink)])).unwrap();
    let refusal = dataplane.hook_problems().without_xdp.remove(&uplink);
    let before = links(&sandbox);
    complete();
    for _ in 0..COLLECTIONS_BETWEEN_INSPECTIONS {
        dataplane.collect_garbage().unwrap();
    }
    let after = links(&sandbox);
    if is_elsewhere {
        run("ip", &format!("netns del {elsewhere}"));
    }
    let refusal = refusal.expect("it is refused");
    assert!(refusal.contains("ethtool -K dpap tx off"), "{refusal}");
    assert_eq!(before, named(uplink));
    assert_eq!(after, &named(uplink) | &[format!("{uplink}_native")].into());
}

/// Returns a program that drops what has come by the interface, and passes the rest.
fn dropping_what_comes_by(interface: u32) -> OwnedFd {
    const XDP: u32 = 6;
    let program = [
        // r0 = XDP_PASS
        0x0000_0002_0000_00b7,
        // r1 = r1.ingress_ifindex
        0x0000_0000_000c_1161,
        // if r1 != interface goto +1
        0x0000_0000_0001_0155 | u64::from(interface) << 32,
        // r0 = XDP_DROP
        0x0000_0001_0000_00b7,
        // exit
        0x95,
    ];
    bpf::load_program(XDP, bpf_attach_type::BPF_XDP as u32, &program).unwrap()
}

/// Bonds are left to TC, because of this: the kernel runs the program of a bond on its ports. Such
/// a program sees the port that a frame has come by, and not the bond.
#[rstest]
#[case::active_backup("active-backup", true)]
#[case::balance_rr("balance-rr", true)]
#[case::balance_xor("balance-xor", true)]
#[case::lacp("802.3ad", true)]
#[case::broadcast("broadcast", false)]
#[case::balance_tlb("balance-tlb", false)]
#[case::balance_alb("balance-alb", false)]
fn the_kernel_runs_the_program_of_a_bond_on_its_ports(#[case] mode: &str, #[case] takes_programs: bool) {
    let Some(_sandbox) = Sandbox::new() else { return };
    let made =
        Command::new("ip").args(["link", "add", "bond", "type", "bond", "mode", mode]).output().unwrap();
    if !made.status.success() {
        let error = String::from_utf8_lossy(&made.stderr).into_owned();
        println!("skipped: the kernel has no bonding (CONFIG_BONDING): {error}");
        return;
    }
    run("ip", "link add port type veth peer name beyond");
    run("ip", "link set port master bond");
    run("ip", "link set bond up");
    run("ip", "address add 192.0.2.1/24 dev bond");
    let attach = |program: OwnedFd| bpf::link_xdp(program.as_fd(), index("bond"), XdpMode::Native);
    if !takes_programs {
        assert_eq!(attach(dropping_what_comes_by(0)).unwrap_err().errno(), libc::EOPNOTSUPP);
        return;
    }
    let (asks, asked) = mpsc::channel::<()>();
    let (answers, answer) = mpsc::channel();
    thread::scope(move |scope| {
        scope.spawn(move || {
            unshare(CloneFlags::CLONE_NEWNET).unwrap();
            answers.send(Err(gettid().to_string())).unwrap();
            asked.recv().unwrap();
            run("ip", "link set beyond up");
            run("ip", "address add 192.0.2.2/24 dev beyond");
            for () in asked {
                let dialled = TcpStream::connect_timeout(&([192, 0, 2, 1], 9).into(), Duration::from_secs(1));
                let refused = dialled.is_err_and(|error| error.kind() == ErrorKind::ConnectionRefused);
                answers.send(Ok(refused)).unwrap();
            }
        });
        let Err(thread) = answer.recv().unwrap() else { panic!("its namespace comes first") };
        run("ip", &format!("link set beyond netns {thread}"));
        asks.send(()).unwrap();
        let is_reached = || {
            asks.send(()).unwrap();
            answer.recv().unwrap() == Ok(true)
        };
        let link = attach(dropping_what_comes_by(index("bond"))).unwrap();
        // A bond takes a moment to choose its port.
        assert!((0..20).any(|_| is_reached()), "no frame comes by the bond");
        bpf::link_detach(link.as_fd()).unwrap();
        let _link = attach(dropping_what_comes_by(index("port"))).unwrap();
        assert!(!is_reached(), "every frame comes by the port");
    });
}
