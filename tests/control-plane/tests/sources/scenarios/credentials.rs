//! A new token, and a new authority, in their files.

use anyhow::{Result, ensure};
use control_plane::PROXY;
use proxy_ctl::source::kubernetes::failure::Reason;

use crate::{follower::Follower, world::World};

pub(super) fn a_new_token_in_the_file_is_used(world: &mut World) -> Result<()> {
    let mut follower = Follower::listed(world, PROXY)?;
    world.create(&world.service("before"))?;
    follower.wait_served(world, &[("before:main", &[])])?;

    world.server.replace_token(PROXY);
    world.server.restart()?;
    world.create(&world.service("after"))?;
    follower.wait(world, "the old token being refused", |follower| {
        follower.state.kinds().into_iter().all(|kind| follower.state.errors(kind, Reason::Unauthorized) > 0)
    })?;
    ensure!(follower.served().len() == 1, "nothing can have come, nothing may have gone");
    world.server.publish_token(PROXY)?;
    follower.wait_served(world, &[("after:main", &[]), ("before:main", &[])])
}

pub(super) fn a_new_ca_in_the_file_is_trusted(world: &mut World) -> Result<()> {
    let mut follower = Follower::listed(world, PROXY)?;
    world.create(&world.service("before"))?;
    follower.wait_served(world, &[("before:main", &[])])?;

    world.server.replace_certificates()?;
    world.server.restart()?;
    world.renew_client()?;
    world.create(&world.service("after"))?;
    follower.wait(world, "the new certificate being refused", |follower| {
        follower.state.kinds().into_iter().all(|kind| follower.state.errors(kind, Reason::Tls) > 0)
    })?;
    ensure!(follower.served().len() == 1, "nothing can have come, nothing may have gone");
    world.server.publish_authority()?;
    follower.wait_served(world, &[("after:main", &[]), ("before:main", &[])])
}
