package fakeserver

import (
	"errors"
	"fmt"
	"net"
	"os"

	"github.com/spf13/pflag"

	"github.com/karpenter-capi/karpenter-capi/pkg/fakeagent/scenario"
)

type options struct {
	scenario          string
	listenAddress     string
	plaintextLoopback bool
	certFile, keyFile string
	clientCAFile      string
	certificatesDir   string
	serverNames       []string
	controlAddress    string
}

func newOptions() *options {
	return &options{listenAddress: "127.0.0.1:8443", serverNames: []string{"localhost", "127.0.0.1", "::1"}}
}

func (o *options) addFlags(flags *pflag.FlagSet) {
	flags.StringVar(&o.scenario, "scenario", o.scenario,
		"YAML `file` with the scenario. Defaults to the one that --print-example prints.")
	flags.StringVar(&o.listenAddress, "listen-address", o.listenAddress, "`host:port` on which gRPC is served. Port 0 selects a free one.")
	flags.BoolVar(&o.plaintextLoopback, "plaintext-loopback", o.plaintextLoopback,
		"Serve without TLS. --listen-address must be a loopback address, and every process that can connect to it has the role admin.")
	flags.StringVar(&o.certificatesDir, "certificates-dir", o.certificatesDir,
		"Path of the `directory` in which a new CA and the certificates that it signs are written at each start: ca.crt, and a directory with tls.crt and "+
			"tls.key for each Cluster (cluster/NAMESPACE/NAME) and for each identity of the scenario.")
	flags.StringSliceVar(&o.serverNames, "server-names", o.serverNames,
		"DNS `names` and IP addresses in the server's certificate in --certificates-dir.")
	flags.StringVar(&o.certFile, "tls-cert-file", o.certFile,
		"PEM `file` with the server's certificate chain, instead of --certificates-dir. Reloaded when it changes.")
	flags.StringVar(&o.keyFile, "tls-key-file", o.keyFile, "PEM `file` with the server's private key. Reloaded when it changes.")
	flags.StringVar(&o.clientCAFile, "client-ca-file", o.clientCAFile,
		"PEM `file` with the certificate authorities that sign client certificates. Reloaded when it changes.")
	flags.StringVar(&o.controlAddress, "control-address", o.controlAddress,
		"Loopback `host:port` on which the test control API is served over HTTP. capi-agent-conformance creates node groups and machines with "+
			"it. Requires --certificates-dir. If empty, it is not served.")
}

// validate returns an error that names the flag of every mistake.
func (o *options) validate() error {
	var errs []error
	wrong := func(format string, args ...any) { errs = append(errs, fmt.Errorf(format, args...)) }
	if _, _, err := net.SplitHostPort(o.listenAddress); err != nil {
		wrong("--listen-address: %q is not host:port", o.listenAddress)
	} else if o.plaintextLoopback && !loopback(o.listenAddress) {
		wrong("--listen-address: %q is not a loopback address, which --plaintext-loopback needs; use --certificates-dir elsewhere", o.listenAddress)
	}
	files := 0
	for flag, file := range map[string]string{"--tls-cert-file": o.certFile, "--tls-key-file": o.keyFile, "--client-ca-file": o.clientCAFile} {
		if file == "" {
			continue
		}
		files++
		if o.plaintextLoopback || o.certificatesDir != "" {
			wrong("%s: there is another way to serve, --plaintext-loopback or --certificates-dir; drop one", flag)
		}
	}
	switch {
	case o.plaintextLoopback && o.certificatesDir != "":
		wrong("--certificates-dir: without TLS there are no certificates; drop it or --plaintext-loopback")
	case files > 0 && files < 3:
		wrong("--tls-cert-file, --tls-key-file and --client-ca-file belong together; set all three")
	case files == 0 && !o.plaintextLoopback && o.certificatesDir == "":
		wrong("set --plaintext-loopback, --certificates-dir, or --tls-cert-file, --tls-key-file and --client-ca-file")
	}
	if o.certificatesDir != "" && len(o.serverNames) == 0 {
		wrong("--server-names: the server's certificate needs a name")
	}
	if o.controlAddress != "" {
		if !loopback(o.controlAddress) {
			wrong("--control-address: %q is not a loopback host:port", o.controlAddress)
		}
		if o.certificatesDir == "" {
			wrong("--control-address: it issues certificates, for which --certificates-dir is needed")
		}
	}
	return errors.Join(errs...)
}

func loopback(address string) bool {
	host, _, err := net.SplitHostPort(address)
	if err != nil {
		return false
	}
	ip := net.ParseIP(host)
	return host == "localhost" || ip != nil && ip.IsLoopback()
}

func (o *options) load() (*scenario.Scenario, error) {
	content := scenario.Example()
	if o.scenario != "" {
		var err error
		if content, err = os.ReadFile(o.scenario); err != nil {
			return nil, fmt.Errorf("--scenario: %w", err)
		}
	}
	s, err := scenario.Parse(content)
	if err != nil {
		return nil, fmt.Errorf("--scenario %s: %w", o.scenario, err)
	}
	return s, nil
}
