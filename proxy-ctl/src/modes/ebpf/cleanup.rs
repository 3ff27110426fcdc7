//! Removes everything that mode ebpf has left on the node, and nothing else.

use std::path::Path;

use super::{
    Error,
    hooks::attach::filters::remove_filters,
    maps::{
        paths::{Paths, SOCKET_LINK, is_there, names, remove_folder},
        pins::{remove_link, remove_pin},
    },
};
use crate::{modes::Removed, sys::net::tc::Direction};

/// Detaches the programs first, and then removes the maps, of every layout version. If nothing of
/// ours is there, nothing is done. While a controller runs, the result is [`Error::Locked`].
pub fn cleanup(bpffs: &Path) -> Result<Removed, Error> {
    let mut removed = Removed::default();
    let current = Paths::new(bpffs);
    if !is_there(&current.top)? {
        return Ok(removed);
    }
    let lock = current.lock()?;
    let links = names(&current.links())?;
    remove_links(&current, &links, Step::BeforeStack, &mut removed)?;
    remove_links(&current, &links, Step::Ingress, &mut removed)?;
    remove_links(&current, &links, Step::Egress, &mut removed)?;
    for index in names(&current.clsact())?.iter().filter_map(|name| name.parse().ok()) {
        removed.filters += remove_filters(&current, index)?;
    }
    remove_links(&current, &links, Step::Sending, &mut removed)?;
    remove_links(&current, &links, Step::Answers, &mut removed)?;
    for folder in [current.links(), current.clsact()] {
        remove_folder(&folder)?;
    }
    for version in names(&current.top)? {
        let paths = Paths { root: current.top.join(&version), ..current.clone() };
        for folder in [paths.maps(), paths.before(), paths.larger()] {
            for name in names(&folder)? {
                if remove_pin(&folder.join(&name))? {
                    removed.objects.push(name);
                }
            }
            remove_folder(&folder)?;
        }
        remove_folder(&paths.root)?;
    }
    remove_folder(&current.top)?;
    drop(lock);
    Ok(removed)
}

/// Steps in which links are removed, in this order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Step {
    /// XDP comes first, because its programs leave packets to the programs of the interfaces.
    BeforeStack,
    /// While the socket programs are attached, no new socket of this node sends to a frontend. So
    /// no socket waits for an answer that the programs of interfaces would have to translate.
    Ingress,
    /// Egress programs translate the answers to what ingress has translated before.
    Egress,
    /// From here on, sockets send to the frontends themselves.
    Sending,
    /// Answers to what was sent before come from backends, and are translated until here.
    Answers,
}

impl Step {
    /// Returns the step of the link that is pinned by this name.
    fn of(link: &str) -> Self {
        match link.strip_prefix(SOCKET_LINK) {
            Some(hook) if hook.starts_with("connect") || hook.starts_with("sendmsg") => Self::Sending,
            Some(_) => Self::Answers,
            None if link.contains("_xdp_") => Self::BeforeStack,
            None if link.ends_with(Direction::Egress.name()) => Self::Egress,
            None => Self::Ingress,
        }
    }
}

fn remove_links(paths: &Paths, links: &[String], step: Step, removed: &mut Removed) -> Result<(), Error> {
    for name in links.iter().filter(|name| Step::of(name) == step) {
        if remove_link(&paths.links().join(name))? {
            removed.links.push(name.clone());
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use rstest::rstest;

    use super::Step::{self, Answers, BeforeStack, Egress, Ingress, Sending};

    #[rstest]
    #[case::before_the_stack("3_xdp_driver", BeforeStack)]
    #[case::ingress("3_ingress", Ingress)]
    #[case::egress("3_egress", Egress)]
    #[case::connect("cgroup_connect4", Sending)]
    #[case::connect_mapped("cgroup_connect6", Sending)]
    #[case::send("cgroup_sendmsg6", Sending)]
    #[case::receive("cgroup_recvmsg4", Answers)]
    #[case::name_of_the_peer("cgroup_getpeername6", Answers)]
    #[case::release("cgroup_sock_release", Answers)]
    fn links_are_removed_in_steps(#[case] link: &str, #[case] step: Step) {
        assert_eq!(Step::of(link), step);
    }
}
