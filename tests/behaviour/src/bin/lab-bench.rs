//! New connections through a service compared with direct ones, in the same run.

use std::{net::SocketAddr, process::ExitCode};

use anyhow::{Result, ensure};
use behaviour::{
    setting::{PathKind, ProxyKind, Setting},
    world::World,
};
use clap::Parser;
use lab::{
    Lab, Objects, Protocol,
    address::{Addresses, Family, cluster_ip},
    agent::protocol::{Bench, Rate},
    cluster::BYTE_PORT,
    objects::{Endpoint, Service},
};

#[derive(Parser)]
#[command(about = "Connections through a service compared with direct ones")]
struct Arguments {
    /// Rounds, alternating between direct and through the service
    #[arg(long, default_value_t = 5)]
    rounds: u32,
    /// Seconds of each measurement
    #[arg(long, default_value_t = 2.0)]
    seconds: f64,
    /// Services in the second half of the table
    #[arg(long, default_value_t = 10_000)]
    services: u16,
    /// Only this path
    #[arg(long, value_enum)]
    path: Option<PathKind>,
    /// Connections at once
    #[arg(long, default_value_t = 4)]
    clients: u32,
}

const CLIENT: &str = "client-1";
const SERVER: &str = "web-1";
const PORT: u16 = 80;
/// Of the service that is measured; the others follow it.
const INDEX: u16 = 300;

fn main() -> ExitCode {
    match run(&Arguments::parse()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("bench: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn run(arguments: &Arguments) -> Result<()> {
    lab::cluster::remove_on_signals()?;
    println!(
        "connect, one byte there and back, close; {} at once; medians of {} rounds of {} s, direct and",
        arguments.clients, arguments.rounds, arguments.seconds
    );
    println!("through the service in turn; ratio: service / direct, median of the rounds' own ratios\n");
    println!(
        "{:<9} {:<9} {:>9} | {:>10} {:>10} {:>6} | {:>9} {:>9}",
        "path", "protocol", "services", "direct/s", "service/s", "ratio", "direct us", "serv. us"
    );
    for path in [PathKind::Sockets, PathKind::Packets] {
        if arguments.path.is_some_and(|only| only != path) {
            continue;
        }
        for services in [1, arguments.services] {
            let setting = Setting::new(ProxyKind::Ebpf, path);
            let world = World::with_services(setting, false, |lab, objects| publish(lab, objects, services))?;
            for protocol in [Protocol::Tcp, Protocol::Udp] {
                measure(arguments, &world, protocol, services)?;
            }
        }
    }
    Ok(())
}

fn publish(lab: &Lab, objects: &mut Objects, services: u16) -> Result<()> {
    let server = lab.netns(SERVER)?.addresses;
    let service = Service::new("measured", cluster_ip(INDEX), PORT, BYTE_PORT, None);
    objects.set_service(&service, &[Endpoint::ready(server, 1)]);
    for other in 1..services {
        let [high, low] = other.to_be_bytes();
        let nobody = Addresses {
            v4: [10, 245, high, low].into(),
            v6: [0xfd00, 0x10, 0x245, 0, 0, 0, 0, other].into(),
        };
        let service =
            Service::new(&format!("other-{other}"), cluster_ip(INDEX + other), PORT, BYTE_PORT, None);
        objects.set_service(&service, &[Endpoint::ready(nobody, 2)]);
    }
    Ok(())
}

fn measure(arguments: &Arguments, world: &World, protocol: Protocol, services: u16) -> Result<()> {
    let server = world.addresses(SERVER)?.of(Family::V4);
    let direct = SocketAddr::new(server, BYTE_PORT);
    let service = SocketAddr::new(cluster_ip(INDEX).of(Family::V4), PORT);
    let bench = |target: SocketAddr| -> Result<Rate> {
        let bench = Bench { target, protocol, clients: arguments.clients, seconds: arguments.seconds };
        let rate = world.agent(CLIENT)?.bench(&bench)?;
        ensure!(
            rate.failed == 0,
            "{} requests to {target} failed\n{}",
            rate.failed,
            world.tool(1, &["status"])?
        );
        Ok(rate)
    };
    // What is only slow the first time is not measured.
    for target in [direct, service] {
        bench(target)?;
    }
    let (mut directs, mut throughs) = (Vec::new(), Vec::new());
    for round in 0..arguments.rounds {
        // Whoever comes first in a round changes, so that a drift of the machine hits both.
        if round % 2 == 0 {
            directs.push(bench(direct)?);
            throughs.push(bench(service)?);
        } else {
            throughs.push(bench(service)?);
            directs.push(bench(direct)?);
        }
    }
    let ratios =
        directs.iter().zip(&throughs).map(|(direct, through)| through.per_second / direct.per_second);
    let path = world.setting.path.to_string();
    println!(
        "{path:<9} {protocol:<9} {services:>9} | {:>10.0} {:>10.0} {:>6.3} | {:>9.0} {:>9.0}",
        median(directs.iter().map(|rate| rate.per_second)),
        median(throughs.iter().map(|rate| rate.per_second)),
        median(ratios),
        median(directs.iter().map(|rate| rate.p50_micros)),
        median(throughs.iter().map(|rate| rate.p50_micros)),
    );
    Ok(())
}

fn median(values: impl Iterator<Item = f64>) -> f64 {
    let mut values: Vec<f64> = values.collect();
    values.sort_by(f64::total_cmp);
    values.get(values.len() / 2).copied().unwrap_or(f64::NAN)
}
