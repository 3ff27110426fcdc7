//! Finds out which parts of the kernel are loaded, built in, or still to be loaded.

use std::{
    collections::{BTreeMap, BTreeSet},
    fmt,
};

/// A part of the kernel that can be a module.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct KernelModule {
    /// The name as /proc/modules has it, with `_` and never `-`.
    pub name: String,
    /// The option of the kernel's configuration, such as `CONFIG_IP_VS`.
    pub option: String,
}

impl KernelModule {
    pub fn new(name: &str, option: &str) -> Self {
        Self { name: name.to_owned(), option: option.to_owned() }
    }

    /// Returns the module of this name, whose option has the same name, as most have.
    pub fn named(name: &str) -> Self {
        Self::new(name, &format!("CONFIG_{}", name.to_uppercase()))
    }
}

/// The texts that list modules. `None` if there is no such file, or it cannot be read.
#[derive(Clone, Debug, Default)]
pub struct ModuleTexts {
    /// The text of `/proc/modules`.
    pub loaded: Option<String>,
    /// The names of the folders in /sys/module, one a line. They are those of loaded modules, and
    /// of modules that are built in and have parameters.
    pub folders: Option<String>,
    /// The text of `/lib/modules/<release>/modules.builtin`.
    pub built_in: Option<String>,
    /// The text of `/lib/modules/<release>/modules.dep`.
    pub installed: Option<String>,
    /// The text of `/boot/config-<release>`, or of `/proc/config.gz` unpacked.
    pub config: Option<String>,
    /// The text of `/proc/sys/kernel/modules_disabled`.
    pub disabled: Option<String>,
}

/// The state of the kernel's modules, as far as it is known.
#[derive(Clone, Debug, Default, Eq, PartialEq)]
pub struct Modules {
    present: BTreeSet<String>,
    built_in: BTreeSet<String>,
    /// `None` if it is not known what is installed.
    installed: Option<BTreeSet<String>>,
    /// The options with their values. `None` if they are not known.
    options: Option<BTreeMap<String, String>>,
    loading_is_off: bool,
    /// Modules that the kernel was asked for in vain, each with the reason.
    pub refused: BTreeMap<String, String>,
}

#[derive(Clone, Debug, Eq, PartialEq)]
pub enum ModuleState {
    Present,
    BuiltIn,
    /// The kernel loads it when it is used.
    Loadable,
    /// It is not known if the kernel has it. The kernel may load it when it is used.
    Unknown,
    /// The reason why it is missing, and what can be done.
    Missing(String),
}

impl fmt::Display for ModuleState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Present => "loaded",
            Self::BuiltIn => "built in",
            Self::Loadable => "loadable",
            Self::Unknown => "not known",
            Self::Missing(_) => "missing",
        })
    }
}

/// Returns the name of the module in a path such as `kernel/net/netfilter/ipvs/ip_vs_rr.ko.xz`.
fn of_path(path: &str) -> Option<String> {
    let (name, _) = path.rsplit('/').next()?.split_once(".ko")?;
    Some(normal(name))
}

fn lines(text: &Option<String>) -> impl Iterator<Item = &str> {
    text.as_deref().unwrap_or_default().lines()
}

fn normal(name: &str) -> String {
    name.trim().replace('-', "_")
}

impl Modules {
    pub fn parse(texts: &ModuleTexts) -> Self {
        let loaded = lines(&texts.loaded).filter_map(|line| line.split(' ').next()).map(normal);
        let option = |line: &str| {
            let unset = |line: &str| Some(line.strip_prefix("# ")?.strip_suffix(" is not set")?.to_owned());
            match line.split_once('=') {
                Some((name, value)) => Some((name.to_owned(), value.trim().to_owned())),
                None => unset(line.trim_end()).map(|name| (name, "n".to_owned())),
            }
        };
        Self {
            present: loaded.chain(lines(&texts.folders).map(normal)).collect(),
            built_in: lines(&texts.built_in).filter_map(of_path).collect(),
            installed: texts
                .installed
                .as_ref()
                .map(|text| text.lines().filter_map(|line| of_path(line.split(':').next()?)).collect()),
            options: texts.config.as_ref().map(|text| text.lines().filter_map(option).collect()),
            loading_is_off: texts.disabled.as_ref().is_some_and(|text| text.trim() == "1"),
            refused: BTreeMap::new(),
        }
    }

    pub fn state(&self, module: &KernelModule) -> ModuleState {
        let KernelModule { name, option } = module;
        let value = self.options.as_ref().map(|options| options.get(option).map_or("n", String::as_str));
        if self.built_in.contains(name) || value == Some("y") {
            return ModuleState::BuiltIn;
        }
        if self.present.contains(name) {
            return ModuleState::Present;
        }
        let is_installed = self.installed.as_ref().map(|installed| installed.contains(name));
        let missing = |why: String| ModuleState::Missing(format!("the module {name} is missing: {why}"));
        if let Some(why) = self.refused.get(name) {
            return missing(format!("{why}; run `modprobe {name}` on the node"));
        }
        match (value, is_installed) {
            (Some("n"), _) => missing(format!("the kernel is built without {option}")),
            (_, Some(false)) => missing(format!(
                "it is not installed below /lib/modules; install the package with the kernel's further modules, \
                 then run `modprobe {name}`"
            )),
            (Some(_), _) | (_, Some(true)) if self.loading_is_off => missing(format!(
                "kernel.modules_disabled is 1; load it at boot, before that is set (/etc/modules-load.d: {name})"
            )),
            (Some(_), _) | (_, Some(true)) => ModuleState::Loadable,
            (None, None) => ModuleState::Unknown,
        }
    }

    /// Returns the value of an option of the kernel's configuration, or `None` if the configuration
    /// cannot be read. It is `n` for an option that is not set, and the empty text for one that
    /// this kernel does not have.
    pub fn option(&self, name: &str) -> Option<&str> {
        let options = self.options.as_ref()?;
        Some(options.get(name).map_or("", String::as_str))
    }

    /// Returns why there is no such module, and what can be done. `None` if the module is there, or
    /// may be.
    pub fn missing(&self, module: &KernelModule) -> Option<String> {
        match self.state(module) {
            ModuleState::Missing(why) => Some(why),
            ModuleState::Present | ModuleState::BuiltIn | ModuleState::Loadable | ModuleState::Unknown => {
                None
            }
        }
    }

    /// Returns true if the module is known to be there without any loading.
    pub fn has(&self, module: &KernelModule) -> bool {
        matches!(self.state(module), ModuleState::Present | ModuleState::BuiltIn)
    }
}
