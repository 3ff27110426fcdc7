//! A new certificate authority, in the files of a kubeconfig.

use anyhow::{Result, ensure};
use control_plane::PROXY;
use proxy_ctl::kubernetes::failure::FailureReason;

use crate::{follower::Follower, world::World};

/// Gives the server's certificate and the client's another authority.
pub(super) fn new_certificates_in_the_files_are_used(world: &mut World) -> Result<()> {
    let mut by_token = Follower::listed(world, PROXY)?;
    let certificate = |world: &World| world.server.kubeconfig_with_certificate("certified", PROXY.user);
    let mut by_certificate = Follower::start_with(world, &certificate(world)?)?;
    by_certificate.wait_listed(world)?;
    world.create(&world.service("before"))?;
    for follower in [&mut by_token, &mut by_certificate] {
        follower.wait_served(world, &[("before:main", &[])])?;
    }

    world.server.replace_certificates()?;
    world.server.restart()?;
    world.renew_client()?;
    world.create(&world.service("after"))?;
    for follower in [&mut by_token, &mut by_certificate] {
        follower.wait(world, "the new certificate being refused", |follower| {
            follower.state.kinds().into_iter().all(|kind| follower.state.errors(kind, FailureReason::Tls) > 0)
        })?;
        ensure!(follower.served().len() == 1, "nothing can have come, nothing may have gone");
    }
    world.server.publish_authority()?;
    let served: [(&str, &[&str]); 2] = [("after:main", &[]), ("before:main", &[])];
    by_token.wait_served(world, &served)?;
    by_certificate.wait(world, "our old certificate being refused", |follower| {
        follower
            .state
            .kinds()
            .into_iter()
            .all(|kind| follower.state.errors(kind, FailureReason::Unauthorized) > 0)
    })?;
    certificate(world)?;
    by_certificate.wait_served(world, &served)
}
