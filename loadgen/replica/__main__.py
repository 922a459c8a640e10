from loadgen.replica.command import main

main()
