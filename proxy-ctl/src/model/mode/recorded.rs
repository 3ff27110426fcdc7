//! Facts of real hosts, cut to what modes ask for. A file in `recorded/` has what was printed,
//! below the name of its source.

use super::{Capabilities, HostFacts, IPVS_PARAMETERS, ModuleTexts, Modules, Tool};

pub(crate) const ALL: [(&str, &str); 5] = [
    ("debian 5.10", include_str!("recorded/debian-5.10.txt")),
    ("debian 6.1", include_str!("recorded/debian-6.1.txt")),
    ("debian 6.12", include_str!("recorded/debian-6.12.txt")),
    ("debian 7.2", include_str!("recorded/debian-7.2.txt")),
    // On this host, CONFIG_MODULES and CONFIG_IP_VS are not set.
    ("microvm 6.18", include_str!("recorded/microvm-6.18.txt")),
];

/// The texts that can be read on a host.
#[derive(Clone, Debug)]
pub(crate) struct Host {
    sections: Vec<(String, String)>,
}

impl Host {
    pub(crate) fn named(name: &str) -> Self {
        let (_, text) = ALL.into_iter().find(|(known, _)| *known == name).unwrap();
        let sections = text.split("==> ").filter_map(|section| section.split_once('\n'));
        Self { sections: sections.map(|(name, text)| (name.to_owned(), text.to_owned())).collect() }
    }

    fn text(&self, name: &str) -> Option<String> {
        self.sections.iter().find(|(known, _)| known == name).map(|(_, text)| text.clone())
    }

    /// Returns the host as it is where these texts cannot be read.
    pub(crate) fn without(mut self, names: &[&str]) -> Self {
        self.sections.retain(|(name, _)| !names.contains(&name.as_str()));
        self
    }

    pub(crate) fn with(self, name: &str, text: &str) -> Self {
        let mut host = self.without(&[name]);
        host.sections.push((name.to_owned(), text.to_owned()));
        host
    }

    /// Returns the host as a container sees it that lacks /lib/modules and /boot.
    pub(crate) fn contained(self) -> Self {
        self.without(&["builtin", "dep", "config"])
    }

    /// Returns the host after its IPVS modules were loaded.
    pub(crate) fn loaded(self) -> Self {
        let loaded = self.text("modules, loaded").unwrap();
        self.with("modules", &loaded)
    }

    /// Returns the facts for a process with all rights.
    pub(crate) fn facts(&self) -> HostFacts {
        let texts = ModuleTexts {
            loaded: self.text("modules"),
            folders: self.text("folders"),
            built_in: self.text("builtin"),
            installed: self.text("dep"),
            config: self.text("config"),
            disabled: self.text("modules_disabled"),
        };
        let tool = |name| self.text(name).and_then(|told| Tool::parse(&told)).into_iter().collect();
        HostFacts {
            kernel_release: self.text("osrelease").unwrap_or_default().trim().to_owned(),
            capabilities: Capabilities {
                sys_admin: true,
                bpf: true,
                perfmon: true,
                net_admin: true,
                setgid: true,
            },
            modules: Modules::parse(&texts),
            iptables: tool("iptables"),
            ip6tables: tool("ip6tables"),
            ipset_protocol: None,
            route_localnet: self.text("route_localnet").map(|value| value.trim() == "1"),
            ipvs_parameters: IPVS_PARAMETERS.into_iter().map(|name| (name, 0)).collect(),
            parameters_writable: true,
            ipv6: true,
            skip_nftables_kernel_check: false,
            realtime: false,
        }
    }
}
