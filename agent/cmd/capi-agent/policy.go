package main

import (
	"crypto/x509"
	"errors"
	"fmt"
	"io"
	"os"

	"github.com/spf13/pflag"
	"k8s.io/client-go/util/cert"
	"k8s.io/utils/clock"

	"github.com/karpenter-capi/karpenter-capi/agent/internal/authz"
	"github.com/karpenter-capi/karpenter-capi/agent/internal/options"
)

// policy checks a policy file, and reports its content and the rights of a certificate on out.
func policy(arguments []string, out io.Writer) error {
	flags := pflag.NewFlagSet("capi-agent policy check", pflag.ContinueOnError)
	flags.SortFlags = false
	flags.Usage = func() {
		fmt.Fprintf(flags.Output(), `Usage: capi-agent policy check [flags] FILE

Checks a policy file as the agent does, which goes on with its last valid policy when a new one has a mistake. Every mistake is named.

%s`, flags.FlagUsages())
	}
	trustDomain := flags.String("trust-domain", options.New().TrustDomain, "The agent's own --trust-domain.")
	certificate := flags.String("certificate", "",
		"A PEM file with a client certificate, followed by those of its issuers, up to the root where the policy names the root: "+
			"what it may do is printed. Its signatures are not verified.")
	if err := flags.Parse(arguments); errors.Is(err, pflag.ErrHelp) {
		return nil
	} else if err != nil {
		return err
	}
	if flags.NArg() != 2 || flags.Arg(0) != "check" {
		return errors.New("write `capi-agent policy check FILE`")
	}
	content, err := os.ReadFile(flags.Arg(1))
	if err != nil {
		return fmt.Errorf("reading the policy file: %w", err)
	}
	parsed, err := authz.ParsePolicy(content, *trustDomain)
	if err != nil {
		return err
	}
	fmt.Fprintln(out, "valid:", parsed)
	if *certificate == "" {
		return nil
	}
	chain, err := cert.CertsFromFile(*certificate)
	if err != nil {
		return fmt.Errorf("--certificate: %w", err)
	}
	authorizer, err := authz.New(*trustDomain, func() *authz.Policy { return parsed }, clock.RealClock{})
	if err != nil {
		return fmt.Errorf("--trust-domain: %w", err)
	}
	caller, err := authorizer.FromChains([][]*x509.Certificate{chain})
	if err != nil {
		return fmt.Errorf("--certificate: refused: %w", err)
	}
	fmt.Fprintln(out, "identity:", caller.Identity)
	if of := caller.Onboarding; of != nil && of.ID != "" {
		fmt.Fprintf(out, "onboarding: %s, which has to be the Cluster's present one\n", of.ID)
	}
	for _, grant := range caller.Grants {
		fmt.Fprintln(out, "role:", grant)
	}
	if len(caller.Grants) == 0 {
		fmt.Fprintln(out, "roles: none; it may call GetStatus")
	}
	return nil
}
