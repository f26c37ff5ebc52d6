// Command netchaos runs the product on a bad network between shim and agents; see package netchaos.
// The last line of its output and its exit status report the result.
package main

import "os"

func main() { os.Exit(command(os.Args[1:])) }
