// Shell completion of a command line, out of the parser's own description of it.
#pragma once

#include <string>

namespace CLI {
class App;
}

namespace tessera::tools {

// Scripts that a shell sources: they complete commands, their options and, for values, files. What they print is data
// for the shell only: descriptions are quoted.
std::string bash_completion(const CLI::App& app);
std::string zsh_completion(const CLI::App& app);
std::string fish_completion(const CLI::App& app);

}  // namespace tessera::tools
