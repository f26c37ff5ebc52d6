// Command netchaos runs the product while the network between shim and agents is bad; see package netchaos. The last line of its output says how it
// went, and so does its exit status.
package main

import "os"

func main() { os.Exit(command(os.Args[1:])) }
