// Shell completion of a command line, generated from the parser's description of it.
#pragma once

#include <string>

namespace CLI {
class App;
}

namespace tessera::tools {

// Scripts that a shell sources: they complete commands, options and, for values, files. What they print is only data
// for the shell: descriptions are quoted.
std::string bash_completion(const CLI::App& app);
std::string zsh_completion(const CLI::App& app);
std::string fish_completion(const CLI::App& app);

}  // namespace tessera::tools
